"""Blocks of GGUF files: what a tensor type is, and how bytes and fields of blocks are taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.formats.quantized import F16, F32, I8, U8, CodeFormat, Levels, Scales

Parts = tuple[U8, Scales, F16 | None, I8 | U8 | None, I8 | None]
"""Of n blocks: codes [n, elements], scales and minimums [n, 1], factors of each [n, elements / factors]."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """`numbers` unpacks blocks [n, num_bytes] into float32 [n, elements]. If a block is a group of a `GroupQuantized`
    instead, `codes` is its format, and `parts` unpacks it into that."""

    name: str
    elements: int
    num_bytes: int
    numbers: Callable[[U8], F32] | None = None
    codes: CodeFormat | None = None
    parts: Callable[[U8], Parts] | None = None


def bytes_of(blocks: U8, start: int, size: int) -> U8:
    """Return these bytes of each block. Copied as one number each: six times as fast as slices."""
    return blocks[:, start : start + size].view(f"V{size}").copy().view(np.uint8)


def half_at(blocks: U8, start: int) -> F16:
    """The float16 that each block has at byte `start`, [n, 1]."""
    return blocks[:, start : start + 2].view(np.float16).copy()


def fields(packed: U8, bits: int) -> U8:
    """packed [.., b] of fields of `bits` bits -> [.., 8 / bits, b]: the lowest of all bytes first."""
    size, count = packed.shape[-1], 8 // bits
    out = np.empty((*packed.shape[:-1], count), f"V{size}")
    for i in range(count):
        field = packed >> np.uint8(i * bits)
        field &= np.uint8((1 << bits) - 1)
        out[..., i] = field.view(f"V{size}")[..., 0]
    return out.view(np.uint8).reshape(*packed.shape[:-1], count, size)


def of_32(bits: int, *, minimums: bool = False, levels: Levels = Levels.NONE) -> CodeFormat:
    """Return the format of blocks of 32 values that share one scale."""
    return CodeFormat(bits=bits, minimums=minimums, levels=levels)


def of_256(bits: int, factors: int, *, minimums: bool = False, levels: Levels = Levels.NONE) -> CodeFormat:
    """Return the format of blocks of 256 values, of which each `factors` share a factor."""
    return CodeFormat(bits=bits, minimums=minimums, group=256, factors=factors, levels=levels)
