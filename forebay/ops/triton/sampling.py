"""The most likely and the drawn token of each row: one program per row, which reads it several times from the cache.

Shape letters: S rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.sampling import Draws, SamplingOps
from forebay.ops.triton.launch import kernel

_BLOCK: Final = 4096  # logits that one program looks at together
_WARPS: Final = 8


@kernel
@triton.jit
def _argmax_rows(logits, ids, finite, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
        broken |= (values != values).to(tl.int32)
        better = values > best
        best = tl.where(better, values, best)
        where = tl.where(better, at, where)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, where, vocab), 0)
    good = (tl.max(broken, 0) == 0) & (top < float("inf")) & (top > float("-inf"))
    tl.store(ids + row, tl.where(good, first, 0).to(tl.int64))
    tl.store(finite + row, good)


@kernel
@triton.jit
def _mask_logits(logits, at, words, vocab, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    word = tl.load(words + row * width + column // 32, mask=inside, other=-1)
    forbidden = ((word >> (column % 32)) & 1) == 0
    tl.store(logits + tl.load(at + row) * vocab + column, float("-inf"), mask=inside & forbidden)


@triton.jit
def _weights(logits, row, start, vocab, top, temperature, least, BLOCK: tl.constexpr):
    """Return exp((logits - top) / temperature) in float32, of which those of at least `least` are kept."""
    at = start + tl.arange(0, BLOCK)
    values = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    weights = tl.exp((values - top) / temperature)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def _weigh(logits, row, vocab, top, temperature, least, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many weights are at least `least`, or their sum, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        weights = _weights(logits, row, start, vocab, top, temperature, least, BLOCK)
        if COUNT:
            at = start + tl.arange(0, BLOCK)
            total += ((weights >= least) & (at < vocab)).to(tl.float64)
        else:
            total += weights.to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _smallest_kept(logits, row, vocab, top, temperature, floor, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest t such that the weights from t on, none below `floor`, come to `target`; 0 where all of them do not.

    Positive floats order as their bits do: 30 bits of 0..1 are found one by one.
    """
    low = (row * 0).to(tl.int32)
    high = low + 0x3F800001
    while high - low > 1:
        middle = low + (high - low) // 2
        least = tl.maximum(middle.to(tl.float32, bitcast=True), floor)
        if _weigh(logits, row, vocab, top, temperature, least, COUNT, BLOCK) >= target:
            low = middle
        else:
            high = middle
    return low.to(tl.float32, bitcast=True)


@kernel
@triton.jit
def _sample_rows(
    logits,
    uniform,
    temperatures,
    top_k,
    top_p,
    min_p,
    ids,
    vocab,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
        broken |= (values != values).to(tl.int32)
        best = tl.maximum(best, values)
    top = tl.max(best, 0)
    if (tl.max(broken, 0) > 0) | (top == float("inf")) | (top == float("-inf")):
        tl.store(ids + row, tl.zeros([], tl.int64))
        return
    temperature = tl.maximum(tl.load(temperatures + row), 1.1754943508222875e-38)

    least = top * 0.0
    if HAS_TOP_K:
        k = tl.load(top_k + row)
        if k > 0:
            least = _smallest_kept(logits, row, vocab, top, temperature, least, k.to(tl.float64), True, BLOCK)
    if HAS_TOP_P:
        share = tl.load(top_p + row)
        if share < 1.0:
            whole = _weigh(logits, row, vocab, top, temperature, least, False, BLOCK)
            # A share of 0, as the smallest are in float32, would be reached above the largest weight.
            target = tl.maximum(share.to(tl.float64) * whole, 1e-300)
            kept = _smallest_kept(logits, row, vocab, top, temperature, least, target, False, BLOCK)
            least = tl.maximum(least, kept)
    if HAS_MIN_P:
        least = tl.maximum(least, tl.load(min_p + row))  # the largest weight is 1

    aim = tl.load(uniform + row) * _weigh(logits, row, vocab, top, temperature, least, False, BLOCK)
    before = aim * 0.0
    chosen = tl.zeros([BLOCK], tl.int32) + vocab
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights = _weights(logits, row, start, vocab, top, temperature, least, BLOCK).to(tl.float64)
        sums = before + tl.cumsum(weights, 0)
        kept = weights > 0.0
        chosen = tl.minimum(chosen, tl.where(kept & (sums > aim), at, vocab))
        last = tl.maximum(last, tl.where(kept, at, 0))
        before = tl.max(sums, 0)
    first = tl.min(chosen, 0)
    # The sum of the whole may be a last bit below what the running sums came to, or above: then it is the last token.
    tl.store(ids + row, tl.where(first < vocab, first, tl.max(last, 0)).to(tl.int64))


class TritonSampling(SamplingOps):
    """See `SamplingOps`."""

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `SamplingOps.argmax_rows`, by one program per row."""
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        _argmax_rows[(rows,)](logits, ids, finite, vocab, BLOCK=_block(vocab), num_warps=_WARPS)
        return ids, finite

    def mask_logits(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        """As `SamplingOps.mask_logits`: masked entries of `logits` become -inf in place."""
        (rows, width), vocab = words.shape, logits.shape[1]
        block = _block(vocab)
        _mask_logits[(rows, triton.cdiv(vocab, block))](logits, at, words, vocab, width, BLOCK=block, num_warps=_WARPS)

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        """As `SamplingOps.sample_rows`, without a sort: thresholds are found by bisection over the bits of weights."""
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        _sample_rows[(rows,)](
            logits,
            *draws,
            ids,
            vocab,
            HAS_TOP_K=draws.top_k is not None,
            HAS_TOP_P=draws.top_p is not None,
            HAS_MIN_P=draws.min_p is not None,
            BLOCK=_block(vocab),
            num_warps=_WARPS,
        )
        return ids


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))
