"""Functions that several kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter, with which kernels are tested where there is no GPU.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def owner(starts, count, block, BLOCK: tl.constexpr):
    """Return which of `count` ragged groups the block-th program works for.

    Group i holds entries starts[i]..starts[i + 1], and programs from starts[i] // BLOCK + i on: at least as many as its
    entries fill blocks, however long the groups are. So a grid of total // BLOCK + count programs is enough.
    """
    low = block * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK + middle <= block:
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
