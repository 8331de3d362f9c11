"""The tensor types of GGUF files that are read here: how their blocks become codes, or numbers.

Block layouts are ggml's (`ggml-common.h`). Values are equal to ggml's own to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forebay.formats.quantized import F16, F32, I8, U8, CodeFormat, GroupQuantized

# Of MXFP4: what each four bits stand for, and what is taken from the exponents.
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS: Final = 127


Parts = tuple[U8, F16, F16 | None, I8 | None, I8 | None]
"""Of n blocks: codes [n, elements], scales and minimums [n, 1], factors of each [n, elements / factors]."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """`numbers` takes blocks [n, num_bytes] apart into float32 [n, elements]. Where a block is a group of a
    `GroupQuantized` instead, `codes` says of which format, and `parts` takes it apart into that."""

    name: str
    elements: int
    num_bytes: int
    numbers: Callable[[U8], F32] | None = None
    codes: CodeFormat | None = None
    parts: Callable[[U8], Parts] | None = None


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


def _bytes(blocks: U8, start: int, size: int) -> U8:
    """Return these bytes of each block. Copied as one number each: six times as fast as slices."""
    return blocks[:, start : start + size].view(f"V{size}").copy().view(np.uint8)


def _half(blocks: U8, start: int) -> F16:
    """The float16 that each block has at byte `start`, [n, 1]."""
    return blocks[:, start : start + 2].view(np.float16).copy()


def _fields(packed: U8, bits: int) -> U8:
    """packed [.., b] of fields of so many bits -> [.., 8 / bits, b]: the lowest of all bytes first."""
    size, count = packed.shape[-1], 8 // bits
    out = np.empty((*packed.shape[:-1], count), f"V{size}")
    for i in range(count):
        field = packed >> np.uint8(i * bits)
        field &= np.uint8((1 << bits) - 1)
        out[..., i] = field.view(f"V{size}")[..., 0]
    return out.view(np.uint8).reshape(*packed.shape[:-1], count, size)


def _f32(blocks: U8) -> F32:
    return blocks.view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    bits = blocks.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _mxfp4(blocks: U8) -> F32:
    """Four-bit floats with a power of two for each block (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1)."""
    exponents = blocks[:, :1].astype(np.int32) - E8M0_BIAS
    return np.ldexp(E2M1[_fields(_bytes(blocks, 1, 16), 4).reshape(-1, 32)], exponents)


def _q4_0(blocks: U8) -> Parts:
    return _fields(_bytes(blocks, 2, 16), 4), _half(blocks, 0), None, None, None


def _q4_1(blocks: U8) -> Parts:
    return _fields(_bytes(blocks, 4, 16), 4), _half(blocks, 0), _half(blocks, 2), None, None


def _fifth_bits(blocks: U8, start: int) -> U8:
    low = _fields(_bytes(blocks, start + 4, 16), 4).reshape(-1, 32)
    return low | np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: U8) -> Parts:
    return _fifth_bits(blocks, 2), _half(blocks, 0), None, None, None


def _q5_1(blocks: U8) -> Parts:
    return _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2), None, None


def _q8_0(blocks: U8) -> Parts:
    return _bytes(blocks, 2, 32) ^ np.uint8(0x80), _half(blocks, 0), None, None, None  # signed in the file


def _q2_k(blocks: U8) -> Parts:
    codes, factors = _fields(_bytes(blocks, 16, 64).reshape(-1, 2, 32), 2), blocks[:, :16]
    minimum_factors = (factors >> np.uint8(4)).view(np.int8)
    return codes, _half(blocks, 80), -_half(blocks, 82), (factors & np.uint8(15)).view(np.int8), minimum_factors


def _q3_k(blocks: U8) -> Parts:
    low = _fields(_bytes(blocks, 32, 64).reshape(-1, 2, 32), 2).reshape(-1, 256)
    third = _fields(_bytes(blocks, 0, 32), 1).reshape(-1, 256)
    factors = _fields(_bytes(blocks, 96, 8), 4).reshape(-1, 16)
    factors |= _fields(_bytes(blocks, 104, 4), 2).reshape(-1, 16) << np.uint8(4)
    return low | third << np.uint8(2), _half(blocks, 108), None, factors.view(np.int8) - np.int8(32), None


def _k_factors(packed: U8) -> tuple[I8, I8]:
    """The eight 6-bit factors of scale and minimum of a Q4_K or Q5_K block: packed [n, 12] -> two of [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    factors = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return factors.view(np.int8), minimums.view(np.int8)


def _q4_k(blocks: U8) -> Parts:
    codes = _fields(_bytes(blocks, 16, 128).reshape(-1, 4, 32), 4)
    return codes, _half(blocks, 0), -_half(blocks, 2), *_k_factors(blocks[:, 4:16])


def _q5_k(blocks: U8) -> Parts:
    low = _fields(_bytes(blocks, 48, 128).reshape(-1, 4, 32), 4).reshape(-1, 256)
    fifth = _fields(_bytes(blocks, 16, 32), 1).reshape(-1, 256)
    return low | fifth << np.uint8(4), _half(blocks, 0), -_half(blocks, 2), *_k_factors(blocks[:, 4:16])


def _q6_k(blocks: U8) -> Parts:
    low = _fields(_bytes(blocks, 0, 128).reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = _fields(_bytes(blocks, 128, 64).reshape(-1, 2, 32), 2).reshape(-1, 256)
    return low | high << np.uint8(4), _half(blocks, 208), None, _bytes(blocks, 192, 16).view(np.int8), None


def _iq4_xs(blocks: U8) -> Parts:
    codes = _fields(_bytes(blocks, 8, 128).reshape(-1, 8, 16), 4)
    factors = _fields(_bytes(blocks, 4, 4), 4).swapaxes(1, 2).reshape(-1, 8)
    factors |= _fields(_bytes(blocks, 2, 2), 2).swapaxes(1, 2).reshape(-1, 8) << np.uint8(4)
    return codes, _half(blocks, 0), None, factors.view(np.int8) - np.int8(32), None


def _of_32(bits: int, *, minimums: bool = False, levels: bool = False) -> CodeFormat:
    return CodeFormat(bits=bits, minimums=minimums, levels=levels)


def _of_256(bits: int, factors: int, *, minimums: bool = False, levels: bool = False) -> CodeFormat:
    return CodeFormat(bits=bits, minimums=minimums, group=256, factors=factors, levels=levels)


GGML_TYPES: Final = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, None, _of_32(4), _q4_0),
    3: BlockType("Q4_1", 32, 20, None, _of_32(4, minimums=True), _q4_1),
    6: BlockType("Q5_0", 32, 22, None, _of_32(5), _q5_0),
    7: BlockType("Q5_1", 32, 24, None, _of_32(5, minimums=True), _q5_1),
    8: BlockType("Q8_0", 32, 34, None, _of_32(8), _q8_0),
    10: BlockType("Q2_K", 256, 84, None, _of_256(2, 16, minimums=True), _q2_k),
    11: BlockType("Q3_K", 256, 110, None, _of_256(3, 16), _q3_k),
    12: BlockType("Q4_K", 256, 144, None, _of_256(4, 32, minimums=True), _q4_k),
    13: BlockType("Q5_K", 256, 176, None, _of_256(5, 32, minimums=True), _q5_k),
    14: BlockType("Q6_K", 256, 210, None, _of_256(6, 16), _q6_k),
    20: BlockType("IQ4_NL", 32, 18, None, _of_32(4, levels=True), _q4_0),
    23: BlockType("IQ4_XS", 256, 136, None, _of_256(4, 32, levels=True), _iq4_xs),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
