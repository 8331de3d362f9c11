"""Linear layers of safetensors files in codes: GPTQ, AWQ, and those of compressed-tensors that are whole numbers.

All have codes of 4 or 8 bits in groups of inputs, each with a scale and perhaps a zero point. They differ in names and
in the order of the codes within a word. This module reads the layouts that AutoGPTQ (`checkpoint_format` gptq and
gptq_v2), AutoAWQ (`version` gemm) and compressed-tensors (`pack-quantized`, `int-quantized`, `naive-quantized`) write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.formats.file_array import Array, FileArray
from forebay.formats.float_layers import float_packing
from forebay.formats.layer_packing import NONE_IGNORED, Aliases, IgnoredModules, LayerPacking
from forebay.formats.quantized import (
    F32,
    GROUP,
    U8,
    CodeFormat,
    GroupQuantized,
    Order,
    Reader,
    StoredCodes,
    half,
    stored_codes,
)
from forebay.formats.stored_tensor import as_float32

Parts = Mapping[str, Any]
"""The arrays of one layer by their names: those of the file, of which only shapes are looked at, or what was read."""

_INTEGERS: Final = (np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64))
_REALS: Final = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint16))  # the last are bits of bfloat16
_GROUPS: Final = ("g_idx", "weight_g_idx")  # the group of each input
_QWEIGHT: Final = frozenset({"qweight", "qzeros", "scales", "g_idx"})
_WEIGHT: Final = ("weight_packed", "weight", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape")
# What the arrays of one weight are called, by method.
PART_NAMES: Final = {"gptq": _QWEIGHT, "awq": _QWEIGHT, "compressed-tensors": frozenset(_WEIGHT)}
_AWQ_PLACES: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of eight outputs in a word
_WHOLE_ROWS: Final = 128  # inputs for which a row's one scale is repeated, where they divide it
_PIECE_ROWS: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How layers are packed; `group` 0: one scale a row. `zero_offset` is added to stored zero points."""

    method: str
    bits: int
    group: int
    symmetric: bool
    zero_offset: int = 0
    ignored: IgnoredModules = NONE_IGNORED
    packs_heads = False

    def has(self, part: str, dtype: str) -> bool:
        """Return whether that is an array of a packed layer: `weight` is the name of others, too."""
        return part in PART_NAMES[self.method] and (part != "weight" or dtype == "I8")

    def layer(self, parts: Mapping[str, FileArray], where: str) -> PackedLayer:
        """Return the weight that these arrays stand for. ModelError, which begins with `where`, if they do not go
        together."""
        return PackedLayer(parts, self, where)

    def format(self, name: str, width: int) -> CodeFormat | None:
        """Return the format of the matrix `name`, by its name and inputs alone; None if it is not in codes."""
        return None if self.ignored.matches(name.removesuffix(".weight")) else self.format_of(width)

    def format_of(self, width: int) -> CodeFormat | None:
        """Return the format of layers of this number of inputs; None if their groups are not whole steps."""
        group = self.group or math.gcd(width, _WHOLE_ROWS)
        whole = group % GROUP == 0 and width % group == 0
        return CodeFormat(bits=self.bits, minimums=not self.symmetric, group=group) if whole else None


def packing_of(fields: Any, where: str, aliases: Aliases = ()) -> LayerPacking:
    """From a config.json's quantization_config, which may call modules by their `aliases`. ModelError for a method or
    layout that this module does not read."""
    fields = fields if isinstance(fields, dict) else {}
    found = float_packing(fields) or _whole_numbers(fields)
    if found is None:
        raise ModelError(
            f"{where}: quantization_config {brief(fields)} is not supported: weights are read in GPTQ, AWQ (gemm), FP8 "
            "(E4M3), NVFP4 and compressed-tensors layouts with one format; give the checkpoint in bfloat16, or GGUF"
        )
    return replace(found, ignored=replace(found.ignored, aliases=aliases))


def _whole_numbers(fields: Mapping[str, Any]) -> Packing | None:
    method, found = fields.get("quant_method"), None
    if method == "gptq":
        offset = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
        found = _packing(method, fields.get("bits"), fields.get("group_size"), fields.get("sym", True), offset)
        found = None if fields.get("dynamic") else found
    elif method == "awq" and fields.get("version", "gemm") == "gemm":
        found = _packing(method, fields.get("bits"), fields.get("group_size"), fields.get("zero_point") is False, 0)
        found = None if found is None or found.bits != 4 else found
    elif method == "compressed-tensors":
        found = _compressed(fields)
    ignored = IgnoredModules.of(fields.get("modules_to_not_convert"), fields.get("ignore"))
    return None if found is None else replace(found, ignored=ignored)


def _packing(method: str, bits: Any, group: Any, symmetric: Any, offset: int) -> Packing | None:
    known = bits in (4, 8) and type(group) is int and (group == -1 or 0 < group <= 1 << 16) and type(symmetric) is bool
    return (
        Packing(method=method, bits=bits, group=max(group, 0), symmetric=symmetric, zero_offset=offset)
        if known
        else None
    )


def _compressed(fields: Mapping[str, Any]) -> Packing | None:
    groups = fields.get("config_groups")
    formats = ("pack-quantized", "int-quantized", "naive-quantized")
    if not isinstance(groups, dict) or len(groups) != 1 or fields.get("format") not in formats:
        return None
    (only,) = groups.values()
    weights = only.get("weights") if isinstance(only, dict) else None
    if (
        not isinstance(weights, dict)
        or weights.get("type") != "int"
        or weights.get("strategy") not in ("group", "channel")
    ):
        return None
    group = weights.get("group_size") if weights["strategy"] == "group" else -1
    return _packing("compressed-tensors", weights.get("num_bits"), group, weights.get("symmetric"), 0)


class _Layout(NamedTuple):
    """Where a weight [N, K] is: what reads of some rows the codes [rows, K], scales and zero points [rows, groups]."""

    shape: tuple[int, int]
    num_groups: int
    codes: Callable[[Order], Array]
    scales: Callable[[Order], Array]
    zeros: Callable[[Order], Array]


def _fields(words: Array, bits: int) -> U8:
    """words [rows, n] int32 -> [rows, n * 32 / bits], the lowest bits first."""
    by_byte = np.ascontiguousarray(words).view(np.uint8)
    return by_byte if bits == 8 else np.stack([by_byte & 15, by_byte >> 4], axis=-1).reshape(len(words), -1)


def _columns(words: Array, columns: Order, bits: int, places: Order | None = None) -> Array:
    """words [n, m] int32 of m * 32 / bits columns -> these columns [len(columns), n]."""
    per_word = 32 // bits
    place = columns % per_word
    shift = (place if places is None else places[place]) * bits
    return np.ascontiguousarray((words[:, columns // per_word] >> shift & (1 << bits) - 1).T)


def _check(sound: bool) -> None:
    if not sound:
        raise ValueError


def _by_columns(parts: Parts, packing: Packing) -> _Layout:
    """GPTQ, whose words are of neighbouring inputs, and AWQ, whose words are of neighbouring outputs."""
    words, scales, zeros, bits = parts["qweight"], parts["scales"], parts["qzeros"], packing.bits
    num_groups, outputs = scales.shape
    places = _AWQ_PLACES if packing.method == "awq" else None
    width = len(words) if packing.method == "awq" else len(words) * 32 // bits
    _check(words.shape[1] == (outputs * bits // 32 if packing.method == "awq" else outputs))
    _check(zeros.shape == (num_groups, outputs * bits // 32))
    return _Layout(
        (outputs, width),
        num_groups,
        lambda rows: _fields(words[:, rows].T, bits) if places is None else _columns(words, rows, bits, places),
        lambda rows: scales[:, rows].T,
        lambda rows: _columns(zeros, rows, bits, places) + packing.zero_offset,
    )


def _by_rows(parts: Parts, packing: Packing) -> _Layout:
    """compressed-tensors: words of neighbouring inputs, or a byte for each; zero points of neighbouring outputs."""
    bits, middle = packing.bits, 1 << packing.bits - 1
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if "weight" in parts:
        values = parts["weight"]
        outputs, width = values.shape
        _check(values.dtype == np.int8)
        codes: Callable[[Order], Array] = lambda rows: values[rows].astype(np.int16) + middle  # noqa: E731
    else:
        words, shape = parts["weight_packed"], parts["weight_shape"]
        _check(shape.shape == (2,))
        outputs, width = shape.read().tolist()
        _check(words.shape == (outputs, -(-width * bits // 32)))
        codes = lambda rows: _fields(words[rows], bits)[:, :width]  # noqa: E731
    num_groups = scales.shape[1]
    _check(scales.shape == (outputs, num_groups))
    if zeros is None or zeros.dtype == np.int8:
        _check(zeros is None or zeros.shape == scales.shape)
        whole: Callable[[Order], Array] = lambda rows: (  # noqa: E731
            np.full((len(rows), num_groups), middle, np.int16) if zeros is None else zeros[rows] + np.int16(middle)
        )
        return _Layout((outputs, width), num_groups, codes, lambda rows: scales[rows], whole)
    _check(zeros.shape == (-(-outputs * bits // 32), num_groups))
    return _Layout(
        (outputs, width), num_groups, codes, lambda rows: scales[rows], lambda rows: _columns(zeros.T, rows, bits)
    )


def _layout(parts: Parts, packing: Packing) -> _Layout:
    return (_by_rows if packing.method == "compressed-tensors" else _by_columns)(parts, packing)


def _scales(layout: _Layout, rows: Order) -> F32:
    found = layout.scales(rows)
    return as_float32(np.ascontiguousarray(found), bfloat16=found.dtype == np.uint16)


def _stored_groups(parts: Mapping[str, FileArray], width: int, in_order: Any) -> Any:
    """Return the group of each input: as a part says, or `in_order` without such a part. Raises ValueError."""
    stored = next((parts[name] for name in _GROUPS if name in parts), None)
    _check(stored is None or stored.shape == (width,))
    return in_order if stored is None else stored.read()


class PackedLayer:
    """A weight [N, K], of the arrays that stand for it under the names of `PART_NAMES`. ModelError where these do not
    go together. `codes` are None where inputs of one group are not neighbours, or do not come in whole steps."""

    bfloat16 = False

    def __init__(self, parts: Mapping[str, FileArray], packing: Packing, where: str) -> None:
        self._parts, self._packing, self._where = parts, packing, where
        try:
            _check(all(part.dtype in (_REALS if "scale" in name else _INTEGERS) for name, part in parts.items()))
            layout = _layout(parts, packing)
            self.shape = outputs, width = layout.shape
            _check(outputs > 0 and width > 0)
            in_order = np.arange(width) // (packing.group or width)
            self._groups = _stored_groups(parts, width, in_order)
            _check(0 <= self._groups.min() <= self._groups.max() < layout.num_groups)
        except (KeyError, ValueError, IndexError):
            shapes = {name: (str(part.dtype), part.shape) for name, part in parts.items()}
            raise ModelError(f"{where}: {shapes} are not the parts of a {packing.method} layer") from None
        self.num_bytes = sum(part.nbytes for part in parts.values())
        self.storage = f"{packing.method}, {packing.bits} bits"
        form = packing.format_of(width)
        self.codes: StoredCodes | None = None
        if form is not None and np.array_equal(self._groups, in_order):
            self.codes = stored_codes(form, self.shape, partial(self._open, form))

    def _layout(self) -> _Layout:
        """Decode the tensors read now: one weight is in memory at a time."""
        unread = ("weight_shape", *_GROUPS)
        read = {name: part if name in unread else part.read() for name, part in self._parts.items()}
        return _layout(read, self._packing)

    def _open(self, form: CodeFormat) -> Reader:
        layout = self._layout()
        return lambda rows: self._quantized(form, layout, rows)

    def pieces(self) -> Iterator[F32]:
        """Yield the dequantized weight as float32 blocks of `_PIECE_ROWS` rows."""
        layout = self._layout()
        for first in range(0, self.shape[0], _PIECE_ROWS):
            rows = np.arange(first, min(first + _PIECE_ROWS, self.shape[0]))
            zeros = layout.zeros(rows)[:, self._groups].astype(np.float32)
            yield (layout.codes(rows) - zeros) * _scales(layout, rows)[:, self._groups]

    def _quantized(self, form: CodeFormat, layout: _Layout, rows: Order) -> GroupQuantized:
        scales, zeros = _scales(layout, rows), layout.zeros(rows)
        if not form.minimums and (zeros != form.zero).any():
            raise ModelError(f"{self._where}: it has zero points, and the configuration says that it has none")
        times = self.shape[1] // form.group // scales.shape[1]
        minimums = half((form.zero - zeros) * scales).repeat(times, axis=1) if form.minimums else None
        return GroupQuantized(
            format=form,
            codes=layout.codes(rows).astype(np.uint8, copy=False),
            scales=half(scales).repeat(times, axis=1),
            minimums=minimums,
        )
