"""The tensor types of GGUF files that are read here, and how their blocks become float32.

Block layouts are ggml's (`ggml-common.h`). Each decoder takes blocks `[n, bytes per block]` uint8 and returns
`[n, elements per block]` float32, computed in the order of ggml's own so that the values are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.formats.quantized import GROUP, CodeFormat, GroupQuantized

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

# Of MXFP4: what each four bits stand for, and what is taken from the exponents.
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS: Final = 127


@dataclass(frozen=True, slots=True)
class BlockType:
    """`codes` where a block is a scale, a minimum if there is one, and codes: a group of a `GroupQuantized`."""

    name: str
    elements: int
    num_bytes: int
    decode: Callable[[U8], F32]
    codes: CodeFormat | None = None


def dequantize(raw: U8, block: BlockType) -> F32:
    """raw [rows, bytes per row] -> [rows, elements per row] float32."""
    rows = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(-1, block.num_bytes)
    return block.decode(blocks).reshape(rows, -1)


def split(raw: U8, codes: CodeFormat) -> GroupQuantized:
    """Scales, minimums and codes of raw [rows, bytes per row] apart."""
    # Fields of 16 bytes, which numpy copies as one number each: six times as fast as slices of bytes.
    code_bytes = GROUP * codes.bits // 8
    fields = ["scales", *(["minimums"] if codes.minimums else [])]
    blocks = raw.view([*((field, np.float16) for field in fields), ("codes", f"V{code_bytes}")])
    parts = {field: blocks[field].copy() for field in [*fields, "codes"]}
    bits = parts["codes"].view(np.uint8)
    if codes.bits == 8:
        bits ^= 0x80  # signed in the file
    return GroupQuantized(
        bits=codes.bits, zero=codes.zero, codes=bits, scales=parts["scales"], minimums=parts.get("minimums")
    )


def _half(blocks: U8, start: int) -> F32:
    """The float16 that each block has at byte `start`, [n, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(quants: U8, out: F32) -> None:
    """quants [n, b] -> out [n, 2, b]: low halves first."""
    np.copyto(out[:, 0], quants & 15, casting="unsafe")
    np.copyto(out[:, 1], quants >> 4, casting="unsafe")


def _f32(blocks: U8) -> F32:
    return blocks.view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    bits = blocks.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _q8_0(blocks: U8) -> F32:
    return np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), dtype=np.float32)


def _q4_0(blocks: U8) -> F32:
    out = np.empty((len(blocks), 2, 16), np.float32)
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)[:, :, None]
    return out.reshape(-1, 32)


def _q4_1(blocks: U8) -> F32:
    out = np.empty((len(blocks), 2, 16), np.float32)
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)[:, :, None]
    out += _half(blocks, 2)[:, :, None]
    return out.reshape(-1, 32)


def _k_scales(packed: U8) -> tuple[F32, F32]:
    """The eight 6-bit scales and minima of a Q4_K or Q5_K block: packed [n, 12] -> two of [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_blocks(blocks: U8, quants: F32) -> F32:
    """quants [n, 8, 32] of eight sub-blocks, each with a scale and a minimum -> values [n, 256]; quants is reused."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scales *= _half(blocks, 0)
    minima *= _half(blocks, 2)
    quants *= scales[:, :, None]
    quants -= minima[:, :, None]
    return quants.reshape(-1, 256)


def _q4_k(blocks: U8) -> F32:
    quants = np.empty((len(blocks), 4, 2, 32), np.float32)
    _nibbles(blocks[:, 16:].reshape(-1, 32), quants.reshape(-1, 2, 32))
    return _k_blocks(blocks, quants.reshape(-1, 8, 32))


def _q5_k(blocks: U8) -> F32:
    low = blocks[:, 48:].reshape(-1, 4, 32)
    nibbles = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_blocks(blocks, (nibbles | (fifth << 4)).astype(np.float32))


def _q6_k(blocks: U8) -> F32:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    top = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    quants = (nibbles | (top << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    values: F32 = quants.reshape(-1, 16, 16) * scales[:, :, None]
    return values.reshape(-1, 256)


def _mxfp4(blocks: U8) -> F32:
    """Four-bit floats with a power of two for each block (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1)."""
    exponents = blocks[:, :1].astype(np.int32) - E8M0_BIAS
    nibbles = np.stack([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1).reshape(-1, 32)
    return np.ldexp(E2M1[nibbles], exponents)


GGML_TYPES: Final = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0, CodeFormat(bits=4, zero=8, minimums=False)),
    3: BlockType("Q4_1", 32, 20, _q4_1, CodeFormat(bits=4, zero=0, minimums=True)),
    8: BlockType("Q8_0", 32, 34, _q8_0, CodeFormat(bits=8, zero=128, minimums=False)),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
