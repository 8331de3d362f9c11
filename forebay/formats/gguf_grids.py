"""The GGUF types whose blocks are numbers of codewords: IQ1, IQ2 and IQ3.

A codeword is 4 or 8 neighbouring values of a small alphabet. A grid is the set of those that a type has, in ascending
order of the digits read as a number, the first value lowest. `gguf_grids.bin` has a bit for each possible codeword, set
if the grid has it. The grids are facts of the file format, as in ggml's `ggml-common.h`.

Every value of such a block is d * unit * factor * code: d float16 of the block, unit a power of two of the type, factor
an odd integer of 16 or 32 values, and the code an integer below 44.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.formats.gguf_blocks import BlockType, Parts, bytes_of, fields, half_at, of_256
from forebay.formats.quantized import F16, F32, I8, U8, CodeFormat

_GRIDS: Final = Path(__file__).with_name("gguf_grids.bin")
_BLOCK: Final = 256
_BIAS_5: Final = 16  # what makes unsigned codes of 5 bits of signed ones
_BIAS_6: Final = 32  # the same of 6 bits
_SIGN_SHIFTS: Final = np.array([0, 7, 14, 21], np.uint32)
_THREES: Final = np.array([0, 3, 6, 9], np.uint16)
_IQ2_VALUES: Final = (8, 25, 43)
_IQ1_VALUES: Final = (-8, 0, 8)  # in eighths, for what is added to each is one eighth
_IQ3_XXS_VALUES: Final = (2, 6, 10, 14, 18, 22, 26, 31)  # half of the file format's, all of which are even
_IQ3_S_VALUES: Final = tuple(range(1, 16, 2))


class _Grid(NamedTuple):
    """Where the bits of a grid begin in the file, the values of its alphabet, and how many a codeword has."""

    offset: int
    values: tuple[int, ...]
    length: int


_IQ2_XXS: Final = _Grid(0, _IQ2_VALUES, 8)
_IQ2_XS: Final = _Grid(821, _IQ2_VALUES, 8)
_IQ2_S: Final = _Grid(1642, _IQ2_VALUES, 8)
_IQ1: Final = _Grid(2463, _IQ1_VALUES, 8)
_IQ3_XXS: Final = _Grid(3284, _IQ3_XXS_VALUES, 4)
_IQ3_S: Final = _Grid(3796, _IQ3_S_VALUES, 4)


@functools.cache
def _codewords(grid: _Grid) -> npt.NDArray[Any]:
    """Return the codewords, each as one number of the bytes of its values."""
    base = len(grid.values)
    count = base**grid.length
    num_bytes = -(-count // 8)
    stored = np.frombuffer(_GRIDS.read_bytes(), np.uint8, num_bytes, grid.offset)
    numbers = np.flatnonzero(np.unpackbits(stored, bitorder="little")[:count])
    digits = numbers[:, None] // base ** np.arange(grid.length) % base
    values = np.array(grid.values, np.int8)[digits]
    words: npt.NDArray[Any] = values.view(f"u{grid.length}")[:, 0]
    return words


@functools.cache
def _negatives() -> npt.NDArray[np.uint64]:
    """Return, for each byte of signs, eight bytes that are 255 if its bit is set."""
    signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (signs * np.uint8(255)).view(np.uint64)[:, 0]


@functools.cache
def _sign_bytes() -> U8:
    """Return the byte of signs for each of seven bits: the eighth makes the number of negative values even."""
    seven = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(np.unpackbits(seven[:, None], axis=1), axis=1)
    signs: U8 = seven | odd << np.uint8(7)
    return signs


class Scaled(NamedTuple):
    """The integers of n blocks: codes [n, 256], factors [n, 8 or 16], and d [n, 1]."""

    codes: I8
    factors: I8
    d: F16


@dataclass(frozen=True, slots=True)
class _GridType:
    """How blocks become `Scaled`, and the unit of its values."""

    unit: float
    scaled: Callable[[U8], Scaled]

    def numbers(self, blocks: U8) -> F32:
        """blocks [n, bytes] -> [n, 256]. Each product is exact in float32: 11 bits of d, 5 and 6 of the others."""
        codes, factors, d = self.scaled(blocks)
        steps = d.astype(np.float32) * np.float32(self.unit) * factors
        values: F32 = codes.astype(np.float32).reshape(*factors.shape, -1)
        values *= steps[..., None]
        return values.reshape(-1, _BLOCK)

    def five_bits(self, blocks: U8) -> Parts:
        """Codes that are -16 to 15, with one factor for each 32: in the form of Q5_K."""
        codes, factors, d = self.scaled(blocks)
        scales = d * np.float16(self.unit)
        with np.errstate(over="ignore"):  # of a d above 4095, which the check of the minimums refuses
            minimums = scales * np.float16(-_BIAS_5)
        return (codes + np.int8(_BIAS_5)).view(np.uint8), scales, minimums, factors, factors

    def six_bits(self, blocks: U8) -> Parts:
        """Codes that are -32 to 31: in the form of Q6_K, which has a factor for each 16."""
        codes, factors, d = self.scaled(blocks)
        factors = factors.repeat(16 // factors.shape[1], axis=1)
        return (codes + np.int8(_BIAS_6)).view(np.uint8), d * np.float16(self.unit), None, factors, None


def _signed(words: npt.NDArray[Any], signs: npt.NDArray[Any]) -> I8:
    """The values of codewords, those negative whose bit is set in `signs` [n, 32] bytes."""
    masks = _negatives().take(signs)
    codes = words.view(np.uint64).reshape(masks.shape) ^ masks
    return (codes.view(np.uint8) - masks.view(np.uint8)).view(np.int8).reshape(-1, _BLOCK)


def _odd(small: npt.NDArray[Any]) -> I8:
    return (small.astype(np.uint8) << np.uint8(1) | np.uint8(1)).view(np.int8)


def _nibbles(packed: U8) -> U8:
    """packed [n, b] -> [n, 2 b]: the lower four bits of each byte, then the others."""
    return fields(packed, 4).swapaxes(1, 2).reshape(len(packed), -1)


def _with_high(low: U8, high: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return numbers [n, 32 or 64] of a byte each and the bits above it."""
    return low | high.astype(np.uint16).reshape(low.shape) << np.uint16(8)


def _signs_and_factors(words: npt.NDArray[np.uint32]) -> tuple[U8, I8]:
    """words [n, 8] of four times seven bits of signs and four bits of a factor -> [n, 32] and [n, 8]."""
    sevens = words[..., None] >> _SIGN_SHIFTS & np.uint32(127)
    return _sign_bytes().take(sevens).reshape(len(words), -1), _odd(words >> np.uint32(28))


def _iq2_xxs(blocks: U8) -> Scaled:
    pairs = bytes_of(blocks, 2, 64).view(np.uint32).reshape(-1, 8, 2)
    signs, factors = _signs_and_factors(pairs[..., 1])
    chosen = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    return Scaled(_signed(_codewords(_IQ2_XXS).take(chosen), signs), factors, half_at(blocks, 0))


def _iq2_xs(blocks: U8) -> Scaled:
    numbers = bytes_of(blocks, 2, 64).view(np.uint16)
    signs = _sign_bytes().take(numbers >> np.uint16(9))
    words = _codewords(_IQ2_XS).take(numbers & np.uint16(511))
    return Scaled(_signed(words, signs), _odd(_nibbles(bytes_of(blocks, 66, 8))), half_at(blocks, 0))


def _iq2_s(blocks: U8) -> Scaled:
    high = fields(bytes_of(blocks, 66, 8), 2).swapaxes(1, 2)
    words = _codewords(_IQ2_S).take(_with_high(bytes_of(blocks, 2, 32), high))
    codes = _signed(words, bytes_of(blocks, 34, 32))
    return Scaled(codes, _odd(_nibbles(bytes_of(blocks, 74, 8))), half_at(blocks, 0))


def _iq3_xxs(blocks: U8) -> Scaled:
    signs, factors = _signs_and_factors(bytes_of(blocks, 66, 32).view(np.uint32))
    words = _codewords(_IQ3_XXS).take(bytes_of(blocks, 2, 64))
    return Scaled(_signed(words, signs), factors, half_at(blocks, 0))


def _iq3_s(blocks: U8) -> Scaled:
    high = np.unpackbits(bytes_of(blocks, 66, 8), axis=1, bitorder="little")
    words = _codewords(_IQ3_S).take(_with_high(bytes_of(blocks, 2, 64), high))
    codes = _signed(words, bytes_of(blocks, 74, 32))
    return Scaled(codes, _odd(_nibbles(bytes_of(blocks, 106, 4))), half_at(blocks, 0))


def _moved(words: npt.NDArray[Any], down: npt.NDArray[Any]) -> I8:
    """Codewords of IQ1 with one eighth added to all values, or taken off where `down`, [n, words or groups of them]."""
    codes = words.view(np.int8).reshape(*down.shape, -1)
    codes += (1 - 2 * down.astype(np.int8))[..., None]
    return codes.reshape(-1, _BLOCK)


def _iq1_s(blocks: U8) -> Scaled:
    above = bytes_of(blocks, 34, 16).view(np.uint16)
    numbers = _with_high(bytes_of(blocks, 2, 32), above[..., None] >> _THREES & np.uint16(7))
    codes = _moved(_codewords(_IQ1).take(numbers), above >> np.uint16(15))
    return Scaled(codes, _odd(above >> np.uint16(12) & np.uint16(7)), half_at(blocks, 0))


def _iq1_m(blocks: U8) -> Scaled:
    above = _nibbles(bytes_of(blocks, 32, 16))
    numbers = _with_high(bytes_of(blocks, 0, 32), above & np.uint8(7))
    codes = _moved(_codewords(_IQ1).take(numbers), above >> np.uint8(3))
    # Four words: twelve bits each are four factors, and the other four a part of d, the lowest first.
    words = bytes_of(blocks, 48, 8).view(np.uint16)
    factors = _odd(words[..., None] >> _THREES & np.uint16(7)).reshape(-1, 16)
    d = np.bitwise_or.reduce(words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16), axis=1)
    return Scaled(codes, factors, d.view(np.float16)[:, None])


def _type(
    name: str,
    num_bytes: int,
    form: CodeFormat | None,
    unit: float,
    scaled: Callable[[U8], Scaled],
) -> BlockType:
    grid = _GridType(unit, scaled)
    parts = None if form is None else grid.five_bits if form.minimums else grid.six_bits
    return BlockType(name, _BLOCK, num_bytes, grid.numbers, form, parts)


_Q5_K: Final = of_256(5, 32, minimums=True)
_Q6_K: Final = of_256(6, 16)

# In codes where a form that the kernels read has them. Those of IQ2 have seven bits and are held as numbers.
GRID_TYPES: Final = {
    16: _type("IQ2_XXS", 66, None, 1 / 8, _iq2_xxs),
    17: _type("IQ2_XS", 74, None, 1 / 8, _iq2_xs),
    18: _type("IQ3_XXS", 98, _Q6_K, 1 / 2, _iq3_xxs),
    19: _type("IQ1_S", 50, _Q5_K, 1 / 8, _iq1_s),
    21: _type("IQ3_S", 110, _Q5_K, 1.0, _iq3_s),
    22: _type("IQ2_S", 82, None, 1 / 8, _iq2_s),
    29: _type("IQ1_M", 56, _Q6_K, 1 / 8, _iq1_m),
}
