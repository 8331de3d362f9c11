"""Functions that several kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter, with which kernels are tested where there is no GPU.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def owner(starts, count, block, BLOCK: tl.constexpr, SPARE: tl.constexpr = 1):
    """Return which of `count` ragged groups the block-th program works for.

    Group i holds entries starts[i]..starts[i + 1], and programs from starts[i] // BLOCK + SPARE * i on. With SPARE 1
    there are at least as many as its entries fill blocks, with 2 also if its first block is not empty before. So a grid
    of total // BLOCK + SPARE * count programs is enough.
    """
    low = block * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK + SPARE * middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def softplus(x):
    """log(1 + exp(x)), precise to the last bits where exp(x) is small: log(w) * u / (w - 1) makes up for the rounding
    of w = 1 + u."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    exact = w == 1.0
    log1p = tl.where(exact, u, tl.log(w) * u / tl.where(exact, 1.0, w - 1.0))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def dot(a, b):
    """a @ b in float32, of float32 without rounding its factors to fewer bits.

    Triton's interpreter gets the exact sum, rounded once: it would multiply bfloat16 as the integers that its bits are,
    and NumPy's order of a sum depends on the shapes, as that of a matrix unit does not.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """acc + a @ b: a matrix unit adds the products to `acc` one block of inputs after the other."""
    if INTERPRETED:
        return acc + dot(a, b)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _split(x):
    """The first bits of a float32 in bfloat16, and the remainder."""
    bits = x.to(tl.int32, bitcast=True)
    first = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return first, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def dot32(a, b, WHOLE: tl.constexpr):
    """a @ b in float32, of which each is float32 or bfloat16, by a matrix unit that multiplies bfloat16.

    A float32 is the sum of three bfloat16, or of two with the first 16 of its 24 bits if not `WHOLE`. Of two such
    factors, products that are smaller than the bits kept are left out.
    """
    if a.dtype == tl.float32 and b.dtype == tl.float32:
        high, remainder = _split(a)
        middle, low = _split(remainder)
        high_b, remainder = _split(b)
        middle_b, low_b = _split(remainder)
        acc = dot(middle, middle_b)
        if WHOLE:
            acc = dot_add(high, _split(low_b)[0], dot_add(_split(low)[0], high_b, acc))
        acc = dot_add(high, high_b, dot_add(high, middle_b, dot_add(middle, high_b, acc)))
    elif a.dtype == tl.float32:
        high, remainder = _split(a)
        middle, low = _split(remainder)
        acc = dot_add(middle, b, dot(_split(low)[0], b)) if WHOLE else dot(middle, b)
        acc = dot_add(high, b, acc)
    elif b.dtype == tl.float32:
        high, remainder = _split(b)
        middle, low = _split(remainder)
        acc = dot_add(a, middle, dot(a, _split(low)[0])) if WHOLE else dot(a, middle)
        acc = dot_add(a, high, acc)
    else:
        acc = dot(a, b)
    return acc
