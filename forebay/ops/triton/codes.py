"""Weights in codes as a kernel opens them: wide loads of the planes, then bit operations in registers.

Planes are what `forebay.ops.triton.linear` packs: of 32 fields of BITS bits, field i is in byte i % (4 * BITS), above
those before it. So the 16 bytes that a thread loads are whole runs of 32 fields, and no thread needs another's bytes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import triton
import triton.language as tl

from forebay.formats.quantized import LEVELS, Levels
from forebay.ops.triton.common import INTERPRETED

_WORDS: Final = np.frombuffer(LEVELS[Levels.IQ4].tobytes(), np.int64)  # eight levels, a byte each
_IQ4_LOW, _IQ4_HIGH = (tl.constexpr(int(word)) for word in _WORDS)
_NONE, _IQ4, _E2M1, _E4M3 = (tl.constexpr(int(kind)) for kind in Levels)


@triton.jit
def _interleaved(low, high, COLS: tl.constexpr, RUNS: tl.constexpr, SPAN: tl.constexpr):
    """[COLS, RUNS, SPAN] twice -> [COLS, RUNS, 2 * SPAN]: of each run `low`, then `high`."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (COLS, RUNS, 2 * SPAN))


@triton.jit
def fields(words, COLS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr):
    """Words [COLS, DEPTH / PER_WORD] of a plane -> fields [COLS, DEPTH] int32: words of four bytes, or bytes themselves
    of planes of one and two bits."""
    runs: tl.constexpr = DEPTH // 32
    span: tl.constexpr = 4 * BITS
    mask: tl.constexpr = (1 << BITS) - 1
    wide = words.to(tl.int32)
    if BITS >= 4:  # word t of four holds bytes 2t, 2t + 1, 2t + 8 and 2t + 9 of 16
        wide = tl.reshape(wide, (COLS, runs * span // 16, 4))
        wide = tl.join(tl.join(wide & 255, (wide >> 16) & 255), tl.join((wide >> 8) & 255, (wide >> 24) & 255))
        wide = tl.permute(wide, (0, 1, 3, 2, 4))
    wide = tl.reshape(wide, (COLS, runs, span))
    if BITS == 4:
        wide = _interleaved(wide & mask, wide >> 4, COLS, runs, span)
    elif BITS == 2:
        first = _interleaved(wide & mask, (wide >> 2) & mask, COLS, runs, span)
        wide = _interleaved(first, _interleaved((wide >> 4) & mask, wide >> 6, COLS, runs, span), COLS, runs, 2 * span)
    elif BITS == 1:
        first = _interleaved(wide & 1, (wide >> 1) & 1, COLS, runs, span)
        second = _interleaved((wide >> 2) & 1, (wide >> 3) & 1, COLS, runs, span)
        third = _interleaved((wide >> 4) & 1, (wide >> 5) & 1, COLS, runs, span)
        fourth = _interleaved((wide >> 6) & 1, wide >> 7, COLS, runs, span)
        first = _interleaved(first, second, COLS, runs, 2 * span)
        wide = _interleaved(first, _interleaved(third, fourth, COLS, runs, 2 * span), COLS, runs, 4 * span)
    return tl.reshape(wide, (COLS, DEPTH))


@triton.jit
def powers(exponents):
    """Half of the powers of two that E8M0 exponents stand for; the least is no normal number."""
    return tl.maximum(exponents.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True) * 0.5


@triton.jit
def floats(codes):
    """The numbers of E4M3 codes: sign and magnitude as of a float32 whose exponent is 120 too low."""
    codes = codes.to(tl.int32)
    return (((codes & 128) << 24) | ((codes & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def as_floats(values):
    """The E4M3 codes of float32 numbers, rounded half to even, uint8. Their magnitude is 448 at most."""
    bits = tl.abs(values).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    least = ((tl.abs(values) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)  # multiples of 2^-9, below 2^-6
    magnitude = tl.minimum(tl.where(bits < (121 << 23), least, normal), 0x7E)
    return (magnitude | tl.where(values < 0.0, 128, 0)).to(tl.uint8)


@triton.jit
def kept_numbers(codes, dtype: tl.constexpr):
    """The numbers that the codes of an 8-bit cache stand for, exact in `dtype`.

    Where a matrix unit takes operands from registers (mma.sync), the compiler orders the inputs of a sum by the width
    of the loads behind them; wgmma has one order. An instruction that it may not look behind keeps it from that, so
    that decodes and prompts have the same bits.
    """
    if not INTERPRETED:
        codes = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], codes.dtype, is_pure=False, pack=4)
    if codes.dtype == tl.uint8:
        opened = floats(codes)
    else:
        opened = codes.to(tl.float32)
    return opened.to(dtype)


@triton.jit
def _whole(codes, zero):
    """codes - zero, float32: a code is the last bits of 2^23 + code, which takes no conversion of integers."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@triton.jit
def numbers(codes, ZERO: tl.constexpr, LEVELS: tl.constexpr):
    """The numbers that codes stand for, float32; LEVELS is their `Levels`."""
    if LEVELS == _E4M3:
        opened = floats(codes)
    elif LEVELS == _E2M1:  # doubled: sign and magnitude as of a float32 whose exponent is 127 too low
        opened = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * 1.7014118346046923e38
    elif LEVELS == _IQ4:
        eight = tl.where(codes < 8, _IQ4_LOW, _IQ4_HIGH)
        opened = _whole((eight >> ((codes & 7) * 8).to(tl.int64)).to(tl.int32) & 255, ZERO)
    else:
        opened = _whole(codes, ZERO)
    return opened


@triton.jit
def load_numbers(
    scales,
    factors,
    col,
    live,
    start,
    n,
    k,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Load the scales or minimums of inputs `start`.., one for each UNIT inputs, and a factor for each FACTORS.

    From `scales` [K / SPAN, N] and `factors` [K / FACTORS, N], if there are any.
    """
    at = (start + tl.arange(0, DEPTH // UNIT) * UNIT)[None, :]
    stored = tl.load(scales + at // SPAN * n + col[:, None], mask=live[:, None] & (at < k), other=0)
    factor = stored
    if FACTORS > 0:
        at = (start + tl.arange(0, DEPTH // FACTORS) * FACTORS)[None, :]
        factor = tl.load(factors + at // FACTORS * n + col[:, None], mask=live[:, None] & (at < k), other=0)
    return stored, factor


@triton.jit
def steps(
    stored,
    factor,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """The numbers that were stored, float32 [COLS, DEPTH / FACTORS], or / UNIT without factors; SCALES is the type."""
    number = powers(stored) if SCALES == 1 else stored.to(tl.float32)
    if FACTORS > 0:
        factor = floats(factor) if SCALES == 2 else factor.to(tl.float32)
        number = tl.reshape(factor, (COLS, DEPTH // UNIT, UNIT // FACTORS)) * number[:, :, None]
        number = tl.reshape(number, (COLS, DEPTH // FACTORS))
    return number
