"""Linear layers of safetensors files in floats of 8 and 4 bits: FP8, NVFP4 and MXFP4.

They differ in names and in the meaning of a scale. This module reads the layouts of transformers' `fp8` (DeepSeek's),
`fbgemm_fp8`, NVIDIA's `modelopt` (FP8 and NVFP4), and compressed-tensors' `float-quantized`, `naive-quantized`,
`nvfp4-pack-quantized` and `mxfp4-pack-quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.formats.file_array import FileArray
from forebay.formats.layer_packing import NONE_IGNORED, IgnoredModules
from forebay.formats.quantized import (
    F32,
    FP8,
    GROUP,
    MXFP4,
    NVFP4,
    U8,
    CodeFormat,
    GroupQuantized,
    Order,
    Reader,
    StoredCodes,
    stored_codes,
    values_of,
)
from forebay.formats.stored_tensor import as_float32

_BYTE: Final = np.dtype(np.uint8)
_REALS: Final = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint16))  # the last are bits of bfloat16
_MOST_BLOCK: Final = 1 << 16


class Floats(Enum):
    """Forms of codes with scales."""

    FP8 = "FP8"
    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"


# What the arrays of one weight are called.
_NAMES: Final = {
    Floats.FP8: frozenset({"weight", "weight_scale_inv", "weight_scale"}),
    Floats.NVFP4: frozenset({"weight_packed", "weight", "weight_scale", "weight_scale_2", "weight_global_scale"}),
    Floats.MXFP4: frozenset({"weight_packed", "weight_scale"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatPacking:
    """How layers are packed; `block` [outputs, inputs] of FP8 that share a scale, None for one by row or in all. Layers
    in `ignored`, and if there is an `only`, layers outside of it, are not packed."""

    method: str
    floats: Floats
    block: tuple[int, int] | None = None
    ignored: IgnoredModules = NONE_IGNORED
    only: str = ""
    packs_heads = False

    def has(self, part: str, dtype: str) -> bool:
        """Return whether that is an array of a packed layer: `weight` is the name of others, too."""
        packed = "F8_E4M3" if self.floats is Floats.FP8 else "U8"
        return part in _NAMES[self.floats] and (part != "weight" or dtype == packed)

    def format(self, name: str, width: int) -> CodeFormat | None:
        """Return the format of the matrix `name`, by its name and inputs alone; None if it is not in codes."""
        packed = self.only in name and not self.ignored.matches(name.removesuffix(".weight"))
        return self.format_of(width) if packed and width % GROUP == 0 else None

    def format_of(self, width: int) -> CodeFormat:
        """Return the format of a packed matrix with this number of inputs, which its groups divide."""
        if self.floats is Floats.FP8:
            return replace(FP8, group=width if self.block is None else math.gcd(width, self.block[1]))
        return MXFP4 if self.floats is Floats.MXFP4 else replace(NVFP4, group=width)

    def layer(self, parts: Mapping[str, FileArray], where: str) -> FloatLayer:
        """Return the weight that these arrays stand for. ModelError, which begins with `where`, if they do not go
        together."""
        return FloatLayer(parts, self, where)


class FloatLayer:
    """A weight [N, K] in floats of 8 or 4 bits."""

    bfloat16 = False

    def __init__(self, parts: Mapping[str, FileArray], packing: FloatPacking, where: str) -> None:
        self._where = where
        try:
            self._stored = _LAYOUTS[packing.floats](dict(parts), packing)
        except (KeyError, ValueError):
            shapes = {name: (str(part.dtype), part.shape) for name, part in parts.items()}
            layer = f"a layer in {packing.floats.value} of {packing.method}"
            raise ModelError(f"{where}: {shapes} are not the parts of {layer}") from None
        self.shape = self._stored.shape
        self.num_bytes = sum(part.nbytes for part in parts.values())
        self.storage = f"{packing.method}, {packing.floats.value}"

    @property
    def codes(self) -> StoredCodes | None:
        """None if the inputs are not a multiple of a whole step."""
        return None if self._stored.sources[0].format.group % GROUP else self._stored

    def pieces(self) -> Iterator[F32]:
        """Yield the dequantized weight as float32 blocks of rows."""
        return values_of(self._stored, self._where)


def _check(sound: bool) -> None:
    if not sound:
        raise ValueError


def _one_of(parts: dict[str, FileArray], *names: str) -> tuple[str, FileArray]:
    """Take the one array that has one of these names."""
    (found,) = (name for name in names if name in parts)
    return found, parts.pop(found)


def _fp8(parts: dict[str, FileArray], packing: FloatPacking) -> StoredCodes:
    codes, (_, scales) = parts.pop("weight"), _one_of(parts, "weight_scale_inv", "weight_scale")
    outputs, width = codes.shape
    _check(not parts and codes.dtype == _BYTE and scales.dtype in (*_REALS, _BYTE) and outputs > 0 and width > 0)
    block = _block(packing.block, scales.shape, outputs, width)
    form = packing.format_of(width)
    of_groups = np.arange(0, width, form.group) // block[1]

    def open_rows() -> Reader:
        by_block = _float32(scales).reshape(-(-outputs // block[0]), -(-width // block[1]))
        return lambda rows: GroupQuantized(
            format=form, codes=codes.take(rows), scales=by_block[rows // block[0]][:, of_groups]
        )

    return stored_codes(form, (outputs, width), open_rows)


def _block(block: tuple[int, int] | None, stored: tuple[int, ...], outputs: int, width: int) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale. ValueError if the `stored` scales have another shape."""
    if block is not None:
        _check(stored == (-(-outputs // block[0]), -(-width // block[1])))
        return block
    if math.prod(stored) == 1:
        return outputs, width
    _check(stored in ((outputs,), (outputs, 1)))
    return 1, width


def _float32(array: FileArray) -> F32:
    """Read floats, or powers of two by their biased exponents (E8M0)."""
    if array.dtype == _BYTE:
        return _powers(array.read())
    return as_float32(array.read(), bfloat16=array.dtype == np.dtype(np.uint16))


def _powers(exponents: U8) -> F32:
    """Return powers of two by their biased exponents (E8M0 of the OCP MX formats, 1.0); 255 is NaN."""
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers)


def _in_pairs(pairs: U8) -> U8:
    """pairs [rows, n] of codes of 4 bits, the lower first -> [rows, 2 * n]."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


def _nvfp4(parts: dict[str, FileArray], packing: FloatPacking) -> StoredCodes:
    (_, pairs), scales = _one_of(parts, "weight_packed", "weight"), parts.pop("weight_scale")
    name, of_all = _one_of(parts, "weight_scale_2", "weight_global_scale")
    outputs, half = pairs.shape
    _check(not parts and pairs.dtype == scales.dtype == _BYTE and of_all.dtype in _REALS and outputs > 0)
    _check(half > 0 and scales.shape == (outputs, half / 8) and math.prod(of_all.shape) == 1)
    form = packing.format_of(2 * half)

    def open_rows() -> Reader:
        with np.errstate(divide="ignore"):  # infinity is refused with its weight
            scale = np.reciprocal(_float32(of_all)) if name == "weight_global_scale" else _float32(of_all)
        levels_are_doubled = (scale * np.float32(0.5)).reshape(1, 1)
        return lambda rows: GroupQuantized(
            format=form,
            codes=_in_pairs(pairs.take(rows)),
            scales=levels_are_doubled.repeat(len(rows), axis=0),
            factors=scales.take(rows),
        )

    return stored_codes(form, (outputs, 2 * half), open_rows)


def _mxfp4(parts: dict[str, FileArray], packing: FloatPacking) -> StoredCodes:
    pairs, scales = parts.pop("weight_packed"), parts.pop("weight_scale")
    outputs, half = pairs.shape
    _check(not parts and pairs.dtype == scales.dtype == _BYTE and outputs > 0 and half > 0)
    _check(scales.shape == (outputs, half / 16))

    def read(rows: Order) -> GroupQuantized:
        return GroupQuantized(format=MXFP4, codes=_in_pairs(pairs.take(rows)), scales=scales.take(rows))

    return stored_codes(MXFP4, (outputs, 2 * half), lambda: read)


_LAYOUTS: Final[dict[Floats, Callable[[dict[str, FileArray], FloatPacking], StoredCodes]]] = {
    Floats.FP8: _fp8,
    Floats.NVFP4: _nvfp4,
    Floats.MXFP4: _mxfp4,
}


def float_packing(fields: Mapping[str, Any]) -> FloatPacking | None:
    """From a config.json's quantization_config; None for a method that this module does not read."""
    method = fields.get("quant_method")
    made = partial(FloatPacking, ignored=IgnoredModules.of(*(fields.get(name) for name in _IGNORED)))
    if method == "fp8" and fields.get("fmt", "e4m3") == "e4m3":
        size = fields.get("weight_block_size")
        block = _block_size(size)
        return made(method=method, floats=Floats.FP8, block=block) if size is None or block else None
    if method == "fbgemm_fp8":
        return made(method=method, floats=Floats.FP8)
    if method == "modelopt" and fields.get("quant_algo") in ("FP8", "NVFP4"):
        return made(method=method, floats=Floats(fields["quant_algo"]))
    return _compressed(fields, made) if method == "compressed-tensors" else None


_IGNORED: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _block_size(size: Any) -> tuple[int, int] | None:
    """None for anything but two sizes."""
    sizes = size if isinstance(size, list) else []
    return (sizes[0], sizes[1]) if len(sizes) == 2 and all(_is_size(entry) for entry in sizes) else None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MOST_BLOCK


def _only_weights(groups: object) -> Mapping[str, Any]:
    """Return the `weights` of the only group; nothing if there are several groups, or another value."""
    only = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = only.get("weights") if isinstance(only, dict) else None
    return weights if isinstance(weights, dict) else {}


def _compressed(fields: Mapping[str, Any], made: Callable[..., FloatPacking]) -> FloatPacking | None:
    weights = _only_weights(fields.get("config_groups"))
    if weights.get("type") != "float":
        return None
    made = partial(made, method="compressed-tensors")
    layout, strategy = fields.get("format"), weights.get("strategy")
    found = (weights.get("num_bits"), strategy, weights.get("group_size"))
    if layout in ("float-quantized", "naive-quantized") and found[0] == 8:
        block = _block_size(weights.get("block_structure"))
        if strategy == "block" and block:
            return made(floats=Floats.FP8, block=block)
        return made(floats=Floats.FP8) if strategy in ("tensor", "channel") else None
    if layout == "nvfp4-pack-quantized" and found == (4, "tensor_group", 16):
        return made(floats=Floats.NVFP4)
    if layout == "mxfp4-pack-quantized" and found == (4, "group", GROUP):
        return made(floats=Floats.MXFP4)
    return None
