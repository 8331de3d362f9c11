"""The tensor types of GGUF files that are read here: how their blocks become codes, or numbers.

Block layouts are ggml's (`ggml-common.h`). Values are equal to ggml's own to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from forebay.formats.gguf_blocks import BlockType, Parts, bytes_of, fields, half_at, of_32, of_256
from forebay.formats.gguf_grids import GRID_TYPES
from forebay.formats.quantized import F16, F32, I8, MXFP4, NVFP4, U8, CodeFormat, GroupQuantized, Levels


def dequantize(raw: U8, block: BlockType) -> F32:
    """raw [rows, bytes per row] -> [rows, elements per row] float32."""
    if block.numbers is None:
        return split(raw, block).values()
    return block.numbers(_blocks(raw, block)).reshape(len(raw), -1)


def split(raw: U8, block: BlockType) -> GroupQuantized:
    """Split raw [rows, bytes per row] of a type with codes into the codes and their factors."""
    form, parts = block.codes, block.parts
    if form is None or parts is None:
        raise TypeError(f"{block.name} has no codes")

    def by_row(part: Any) -> Any:
        return None if part is None else part.reshape(len(raw), -1)

    codes, scales, minimums, factors, minimum_factors = map(by_row, parts(_blocks(raw, block)))
    return GroupQuantized(
        format=form,
        codes=codes,
        scales=scales,
        minimums=minimums,
        factors=factors,
        minimum_factors=minimum_factors,
    )


def _blocks(raw: U8, block: BlockType) -> U8:
    return np.ascontiguousarray(raw).reshape(-1, block.num_bytes)


def _f32(blocks: U8) -> F32:
    return blocks.view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    bits = blocks.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _i32(blocks: U8) -> F32:
    """Numbers of experts, which are below 2^24 and so exact."""
    return blocks.view(np.int32).astype(np.float32)


def _mxfp4(blocks: U8) -> Parts:
    return fields(bytes_of(blocks, 1, 16), 4), bytes_of(blocks, 0, 1), None, None, None


def _q4_0(blocks: U8) -> Parts:
    return fields(bytes_of(blocks, 2, 16), 4), half_at(blocks, 0), None, None, None


def _q4_1(blocks: U8) -> Parts:
    return fields(bytes_of(blocks, 4, 16), 4), half_at(blocks, 0), half_at(blocks, 2), None, None


def _fifth_bits(blocks: U8, start: int) -> U8:
    low = fields(bytes_of(blocks, start + 4, 16), 4).reshape(-1, 32)
    return low | np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: U8) -> Parts:
    return _fifth_bits(blocks, 2), half_at(blocks, 0), None, None, None


def _q5_1(blocks: U8) -> Parts:
    return _fifth_bits(blocks, 4), half_at(blocks, 0), half_at(blocks, 2), None, None


def _q8_0(blocks: U8) -> Parts:
    return bytes_of(blocks, 2, 32) ^ np.uint8(0x80), half_at(blocks, 0), None, None, None  # signed in the file


def _q2_k(blocks: U8) -> Parts:
    codes, factors = fields(bytes_of(blocks, 16, 64).reshape(-1, 2, 32), 2), blocks[:, :16]
    minimum_factors = (factors >> np.uint8(4)).view(np.int8)
    return codes, half_at(blocks, 80), -half_at(blocks, 82), (factors & np.uint8(15)).view(np.int8), minimum_factors


def _q3_k(blocks: U8) -> Parts:
    low = fields(bytes_of(blocks, 32, 64).reshape(-1, 2, 32), 2).reshape(-1, 256)
    third = fields(bytes_of(blocks, 0, 32), 1).reshape(-1, 256)
    factors = fields(bytes_of(blocks, 96, 8), 4).reshape(-1, 16)
    factors |= fields(bytes_of(blocks, 104, 4), 2).reshape(-1, 16) << np.uint8(4)
    return low | third << np.uint8(2), half_at(blocks, 108), None, factors.view(np.int8) - np.int8(32), None


def _k_factors(packed: U8) -> tuple[I8, I8]:
    """The eight 6-bit factors of scale and minimum of a Q4_K or Q5_K block: packed [n, 12] -> two of [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    factors = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return factors.view(np.int8), minimums.view(np.int8)


def _q4_k(blocks: U8) -> Parts:
    codes = fields(bytes_of(blocks, 16, 128).reshape(-1, 4, 32), 4)
    return codes, half_at(blocks, 0), -half_at(blocks, 2), *_k_factors(blocks[:, 4:16])


def _q5_k(blocks: U8) -> Parts:
    low = fields(bytes_of(blocks, 48, 128).reshape(-1, 4, 32), 4).reshape(-1, 256)
    fifth = fields(bytes_of(blocks, 16, 32), 1).reshape(-1, 256)
    return low | fifth << np.uint8(4), half_at(blocks, 0), -half_at(blocks, 2), *_k_factors(blocks[:, 4:16])


def _q6_k(blocks: U8) -> Parts:
    low = fields(bytes_of(blocks, 0, 128).reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = fields(bytes_of(blocks, 128, 64).reshape(-1, 2, 32), 2).reshape(-1, 256)
    return low | high << np.uint8(4), half_at(blocks, 208), None, bytes_of(blocks, 192, 16).view(np.int8), None


def _iq4_xs(blocks: U8) -> Parts:
    codes = fields(bytes_of(blocks, 8, 128).reshape(-1, 8, 16), 4)
    factors = fields(bytes_of(blocks, 4, 4), 4).swapaxes(1, 2).reshape(-1, 8)
    factors |= fields(bytes_of(blocks, 2, 2), 2).swapaxes(1, 2).reshape(-1, 8) << np.uint8(4)
    return codes, half_at(blocks, 0), None, factors.view(np.int8) - np.int8(32), None


def _ternary(digits: U8, d: F16) -> F32:
    """digits [n, 256] of 0 to 3, which stand for -1 to 2, times d [n, 1]."""
    values = digits.astype(np.float32)
    values -= 1
    values *= d
    return values


def _ternary_parts(digits: U8, d: F16) -> Parts:
    """Return the same values in the form of Q2_K: d * 1 * digit - d * 1."""
    ones = np.ones((len(digits), digits.shape[1] // 16), np.int8)
    return digits, d, -d, ones, ones


def _tq1_digits(blocks: U8) -> U8:
    """Five digits to a byte, four in the last four bytes. A byte is a fraction of 256, of which multiplying by three
    brings a digit after the other, the first lowest in the block, above the point."""

    def digits(start: int, size: int, count: int) -> U8:
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        fractions = bytes_of(blocks, start, size)[:, None, :] * powers
        return (fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(blocks), -1)

    return np.concatenate([digits(0, 32, 5), digits(32, 16, 5), digits(48, 4, 4)], axis=1)


def _tq2_digits(blocks: U8) -> U8:
    return fields(bytes_of(blocks, 0, 64).reshape(-1, 2, 32), 2).reshape(-1, 256)


def _q1_0(blocks: U8) -> Parts:
    """A bit for d or -d, in the form of Q2_K: d * 2 * bit - d * 1."""
    bits, d = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), half_at(blocks, 0)
    ones = np.ones((len(blocks), 8), np.int8)
    return bits, d, -d, ones + ones, ones


def _nvfp4(blocks: U8) -> Parts:
    """Four-bit floats with an unsigned E4M3 scale for each 16 of them; its NaN is 0 here, as in ggml, and NaN with the
    sign that no scale has. There is no scale of all: a half, as levels are doubled."""
    scales = bytes_of(blocks, 0, 4)
    factors = np.where(scales == 0xFF, scales, scales & np.uint8(0x7F))
    factors[scales == 0x7F] = 0
    codes = fields(bytes_of(blocks, 4, 32).reshape(-1, 4, 8), 4)
    return codes, np.full((len(blocks), 1), 0.5, np.float32), None, factors, None


GGML_TYPES: Final = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, None, of_32(4), _q4_0),
    3: BlockType("Q4_1", 32, 20, None, of_32(4, minimums=True), _q4_1),
    6: BlockType("Q5_0", 32, 22, None, of_32(5), _q5_0),
    7: BlockType("Q5_1", 32, 24, None, of_32(5, minimums=True), _q5_1),
    8: BlockType("Q8_0", 32, 34, None, of_32(8), _q8_0),
    10: BlockType("Q2_K", 256, 84, None, of_256(2, 16, minimums=True), _q2_k),
    11: BlockType("Q3_K", 256, 110, None, of_256(3, 16), _q3_k),
    12: BlockType("Q4_K", 256, 144, None, of_256(4, 32, minimums=True), _q4_k),
    13: BlockType("Q5_K", 256, 176, None, of_256(5, 32, minimums=True), _q5_k),
    14: BlockType("Q6_K", 256, 210, None, of_256(6, 16), _q6_k),
    20: BlockType("IQ4_NL", 32, 18, None, of_32(4, levels=Levels.IQ4), _q4_0),
    23: BlockType("IQ4_XS", 256, 136, None, of_256(4, 32, levels=Levels.IQ4), _iq4_xs),
    26: BlockType("I32", 1, 4, _i32),
    30: BlockType("BF16", 1, 2, _bf16),
    34: BlockType(
        "TQ1_0",
        256,
        54,
        lambda blocks: _ternary(_tq1_digits(blocks), half_at(blocks, 52)),
        of_256(2, 16, minimums=True),
        lambda blocks: _ternary_parts(_tq1_digits(blocks), half_at(blocks, 52)),
    ),
    35: BlockType(
        "TQ2_0",
        256,
        66,
        lambda blocks: _ternary(_tq2_digits(blocks), half_at(blocks, 64)),
        of_256(2, 16, minimums=True),
        lambda blocks: _ternary_parts(_tq2_digits(blocks), half_at(blocks, 64)),
    ),
    39: BlockType("MXFP4", 32, 17, None, MXFP4, _mxfp4),
    40: BlockType("NVFP4", 64, 36, None, replace(NVFP4, group=64), _nvfp4),
    41: BlockType("Q1_0", 128, 18, None, CodeFormat(bits=2, minimums=True, group=128, factors=16), _q1_0),
    **GRID_TYPES,
}
