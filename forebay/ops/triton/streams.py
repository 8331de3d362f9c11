"""Hyper-connections: the weights of residual streams, and their mixtures.

The width of all streams together is divided into segments, each with sums of its own, which one program for each token
adds up in order: a token's weights do not depend on the other tokens.

Shape letters: T tokens, N streams, H hidden size, W weights of a token.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.streams import Mixing, MixWeights, StreamOps
from forebay.ops.triton.common import dot32
from forebay.ops.triton.launch import kernel

_TOKENS: Final = 16  # of a program: the least that a matrix unit takes
_SEGMENT: Final = 1024  # entries of the streams with sums of their own
_DEPTH: Final = 64  # entries at a time
_BLOCK: Final = 1024  # entries of a stream that one program mixes


@kernel
@triton.jit(do_not_specialize=["tokens"])
def _stream_sums(
    streams, fn, sums, tokens, width, W: tl.constexpr, W_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """sums[t, s, :W] = fn times the s-th segment of token t's streams; sums[t, s, W] is that of their squares."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * SEGMENT
    w = tl.arange(0, W_BLOCK)
    live = token < tokens
    acc = tl.zeros([TOKENS, W_BLOCK], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(first, tl.minimum(first + SEGMENT, width), DEPTH):
        at = start + tl.arange(0, DEPTH)
        here = streams + token.to(tl.int64)[:, None] * width + at[None, :]
        values = tl.load(here, mask=live[:, None] & (at < width)[None, :], other=0.0)
        weights = tl.load(
            fn + w[None, :] * width + at[:, None], mask=(w < W)[None, :] & (at < width)[:, None], other=0.0
        )
        acc += dot32(values, weights, True)
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    place = sums + (token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (W + 1)
    tl.store(place[:, None] + w[None, :], acc, mask=live[:, None] & (w < W)[None, :])
    tl.store(place + W, squares, mask=live)


@kernel
@triton.jit
def _weights_of_streams(
    sums, scale, base, before, behind, between, segments, width, norm_eps, eps, iterations, N: tl.constexpr,
    BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One token's weights, by the sums of its segments. LAST: those of `before` alone."""
    W: tl.constexpr = N if LAST else (2 + N) * N
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < N
    pair = i[:, None] * N + i[None, :]
    both = live[:, None] & live[None, :]
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK], tl.float32)
    squares = 0.0
    for segment in range(segments):
        at = sums + (token * segments + segment) * (W + 1)
        first += tl.load(at + i, mask=live, other=0.0)
        squares += tl.load(at + W)
        if not LAST:
            second += tl.load(at + N + i, mask=live, other=0.0)
            mixed += tl.load(at + 2 * N + pair, mask=both, other=0.0)
    inverse = tl.rsqrt(squares / width + norm_eps)
    first = first * inverse * tl.load(scale) + tl.load(base + i, mask=live, other=0.0)
    tl.store(before + token * N + i, tl.sigmoid(first) + eps, mask=live)
    if not LAST:
        second = second * inverse * tl.load(scale + 1) + tl.load(base + N + i, mask=live, other=0.0)
        tl.store(behind + token * N + i, 2.0 * tl.sigmoid(second), mask=live)
        mixed = mixed * inverse * tl.load(scale + 2) + tl.load(base + 2 * N + pair, mask=both, other=0.0)
        mixed = tl.where(both, mixed, float("-inf"))
        mixed = tl.where(both, tl.exp(mixed - tl.max(mixed, 1)[:, None]), 0.0)
        mixed = tl.where(both, mixed / tl.sum(mixed, 1)[:, None] + eps, 0.0)
        mixed = tl.where(both, mixed / (tl.sum(mixed, 0)[None, :] + eps), 0.0)
        for _ in range(1, iterations):
            mixed = tl.where(both, mixed / (tl.sum(mixed, 1)[:, None] + eps), 0.0)
            mixed = tl.where(both, mixed / (tl.sum(mixed, 0)[None, :] + eps), 0.0)
        tl.store(between + token * N * N + pair, mixed, mask=both)


@kernel
@triton.jit
def _collapse(streams, weights, out, hidden, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(N):
        row = token * N + i
        acc += tl.load(weights + row) * tl.load(streams + row * hidden + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + at, acc.to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _mix(streams, between, hidden, N: tl.constexpr, N_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Streams of one token become their mixture in place."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, N_BLOCK)
    acc = tl.zeros([N_BLOCK, BLOCK], tl.float32)
    for i in range(N):
        row = token * N + i
        values = tl.load(streams + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
        acc += tl.load(between + row * N + j, mask=j < N, other=0.0)[:, None] * values[None, :]
    tl.debug_barrier()  # another thread of the program may still load what this one replaces
    to = streams + (token * N + j)[:, None] * hidden + at[None, :]
    tl.store(to, acc.to(streams.dtype.element_ty), mask=(j < N)[:, None] & (at < hidden)[None, :])


@kernel
@triton.jit
def _spread(x, weights, out, hidden, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < hidden
    values = tl.load(x + token * hidden + at, mask=live, other=0.0).to(tl.float32)
    for i in range(N):
        row = token * N + i
        share = tl.load(weights + row)
        tl.store(out + row * hidden + at, (values * share).to(out.dtype.element_ty), mask=live)


class TritonStreams(StreamOps):
    """See `StreamOps`."""

    def mix_weights(self, streams: Tensor, mixing: Mixing) -> MixWeights:
        tokens, n = len(streams), mixing.num_streams
        before, behind = streams.new_empty(2, tokens, n, dtype=torch.float32)
        between = streams.new_empty(tokens, n, n, dtype=torch.float32)
        _write_weights(streams, mixing, MixWeights(before, behind, between), last=False)
        return MixWeights(before, behind, between)

    def last_weights(self, streams: Tensor, mixing: Mixing) -> Tensor:
        out = streams.new_empty(len(streams), mixing.num_streams, dtype=torch.float32)
        _write_weights(streams, mixing, MixWeights(out, out, out), last=True)
        return out

    def collapse_streams(self, streams: Tensor, weights: Tensor) -> Tensor:
        tokens, n = weights.shape
        hidden = streams.shape[1] // n
        out = streams.new_empty(tokens, hidden)
        if tokens:
            _collapse[(tokens, triton.cdiv(hidden, _BLOCK))](streams, weights, out, hidden, N=n, BLOCK=_BLOCK)
        return out

    def mix_streams_(self, streams: Tensor, between: Tensor) -> None:
        tokens, n = between.shape[:2]
        hidden = streams.shape[1] // n
        if tokens:
            n_block = triton.next_power_of_2(n)
            block = max(16, _BLOCK // n_block)
            _mix[(tokens, triton.cdiv(hidden, block))](streams, between, hidden, N=n, N_BLOCK=n_block, BLOCK=block)

    def spread_streams(self, x: Tensor, weights: Tensor) -> Tensor:
        (tokens, n), hidden = weights.shape, x.shape[1]
        out = x.new_empty(tokens, n * hidden)
        if tokens:
            _spread[(tokens, triton.cdiv(hidden, _BLOCK))](x, weights, out, hidden, N=n, BLOCK=_BLOCK)
        return out


def _write_weights(streams: Tensor, mixing: Mixing, to: MixWeights, *, last: bool) -> None:
    tokens, width = streams.shape
    if not tokens:
        return
    count, segments = len(mixing.base), triton.cdiv(width, _SEGMENT)
    sums = streams.new_empty(tokens, segments, count + 1, dtype=torch.float32)
    _stream_sums[(triton.cdiv(tokens, _TOKENS), segments)](
        streams,
        mixing.fn,
        sums,
        tokens,
        width,
        W=count,
        W_BLOCK=max(16, triton.next_power_of_2(count)),
        TOKENS=_TOKENS,
        SEGMENT=_SEGMENT,
        DEPTH=_DEPTH,
    )
    _weights_of_streams[(tokens,)](
        sums,
        mixing.scale,
        mixing.base,
        *to,
        segments,
        width,
        mixing.norm_eps,
        mixing.eps,
        mixing.iterations,
        N=mixing.num_streams,
        BLOCK=triton.next_power_of_2(mixing.num_streams),
        LAST=last,
        num_warps=1,
    )
