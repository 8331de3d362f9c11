"""Matrices of safetensors files in blocks of ggml: the output of `forebay models quantize`, for models of any type.

The name of a matrix [N, K] ends in `weight_q4_1` or `weight_q8_0` instead of `weight`. It is bytes [N, bytes of a row]:
the blocks of a row one after the other, as a GGUF file has them. The configuration names the modules that are in 8 bits
while the others are in 4, and those that are not in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.formats.file_array import FileArray
from forebay.formats.gguf_blocks import BlockType
from forebay.formats.gguf_types import GGML_TYPES, split
from forebay.formats.held_format import QUANTIZED_FORMATS
from forebay.formats.quantized import F32, GROUP, U8, CodeFormat, GroupQuantized, Reader, stored_codes, values_of

METHOD: Final = "ggml-blocks"
_BLOCKS: Final = {"weight_q4_1": GGML_TYPES[3], "weight_q8_0": GGML_TYPES[8]}
_FORMATS: Final = {"weight_q4_1": QUANTIZED_FORMATS[4], "weight_q8_0": QUANTIZED_FORMATS[8]}
_PART_OF: Final = {form: part for part, form in _FORMATS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPacking:
    """`bits` of most matrices; `wider` are the modules in 8 bits if `bits` is 4, and `ignored` those in no blocks."""

    bits: int
    wider: frozenset[str]
    ignored: frozenset[str]
    packs_heads = True

    def has(self, part: str, dtype: str) -> bool:
        """Return whether that is an array of a packed layer."""
        return part in _BLOCKS

    def layer(self, parts: Mapping[str, FileArray], where: str) -> BlockLayer:
        """Return the weight that these arrays stand for. ModelError, which begins with `where`, if it is not one."""
        return BlockLayer(parts, where)

    def format(self, name: str, width: int) -> CodeFormat | None:
        """Return the format of the matrix `name`, by its name and inputs alone; None if it is not in codes."""
        module = name.removesuffix(".weight")
        if width % GROUP or module in self.ignored:
            return None
        return QUANTIZED_FORMATS[8 if module in self.wider else self.bits]


def block_packing(fields: Any) -> BlockPacking | None:
    """From a config.json's quantization_config; None for another method. ModelError for fields of other methods."""
    if not isinstance(fields, dict) or fields.get("quant_method") != METHOD:
        return None
    bits = fields.get("bits")
    wider, ignored = (fields.get(name, []) for name in ("modules_in_8_bits", "modules_to_not_convert"))
    if type(bits) is not int or bits not in (4, 8) or not _are_names(wider) or not _are_names(ignored):
        raise ModelError(f"quantization_config: {METHOD} has 4 or 8 bits and lists of modules: write the model again")
    return BlockPacking(bits=bits, wider=frozenset(wider), ignored=frozenset(ignored))


def _are_names(listed: Any) -> bool:
    return isinstance(listed, list) and all(isinstance(entry, str) for entry in listed)


def fields_of(packing: BlockPacking) -> dict[str, Any]:
    """Return the quantization_config that `block_packing` reads."""
    return {
        "quant_method": METHOD,
        "bits": packing.bits,
        "modules_in_8_bits": sorted(packing.wider),
        "modules_to_not_convert": sorted(packing.ignored),
    }


def stored_name(name: str, form: CodeFormat) -> str:
    """Return the name of the array that has the matrix `name` in this format."""
    return f"{name.removesuffix('weight')}{_PART_OF[form]}"


def row_bytes(form: CodeFormat, width: int) -> int:
    """Return the bytes of a row of `width` inputs."""
    return width // GROUP * _BLOCKS[_PART_OF[form]].num_bytes


def to_blocks(weight: GroupQuantized) -> U8:
    """Return the blocks of each row, [rows, bytes of a row]."""
    codes = weight.codes.reshape(-1, GROUP)
    heads = [weight.scales] if weight.minimums is None else [weight.scales, weight.minimums]
    half = GROUP // 2
    packed = codes ^ np.uint8(0x80) if weight.minimums is None else codes[:, :half] | codes[:, half:] << np.uint8(4)
    parts: Sequence[U8] = [*(head.reshape(-1, 1).view(np.uint8) for head in heads), packed]
    return np.concatenate(parts, axis=1).reshape(len(weight.codes), -1)


class BlockLayer:
    """A weight [N, K] in blocks."""

    bfloat16 = False

    def __init__(self, parts: Mapping[str, FileArray], where: str) -> None:
        (name, array), *others = parts.items()
        block = _BLOCKS[name]
        whole = len(array.shape) == 2 and array.dtype == np.uint8 and array.shape[1] % block.num_bytes == 0
        if others or not whole or 0 in array.shape:
            shapes = {name: (str(part.dtype), part.shape) for name, part in parts.items()}
            raise ModelError(f"{where}: {shapes} are not one matrix in blocks")
        self.shape = array.shape[0], array.shape[1] // block.num_bytes * block.elements
        self.num_bytes, self.storage = array.nbytes, block.name
        self._where = where
        self.codes = stored_codes(_FORMATS[name], self.shape, lambda: _reader(array, block))

    def pieces(self) -> Iterator[F32]:
        """Yield the dequantized weight as blocks of rows."""
        return values_of(self.codes, self._where)


def _reader(array: FileArray, block: BlockType) -> Reader:
    return lambda order: split(array.take(order), block)
