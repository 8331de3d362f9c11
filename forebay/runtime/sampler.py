"""Choosing tokens. Every row's choice depends on that row alone, by a bit: not on the batch, nor on its place in it.

Shape letters: N sequences that sample, D of them that draw at random, V vocabulary.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final

import torch
from torch import Tensor

from forebay.pools.request_rows import SamplingRows

_BLOCK_ELEMENTS: Final = 1 << 19  # logits drawn from at a time: intermediate results then stay within a few MiB
_BINS: Final = 1 << 15  # a probability's sign is 0, so its upper half has 15 bits
_FINE_BINS: Final = 1 << 16


class Wants(IntFlag):
    """What a row needs besides the most likely token."""

    GREEDY = 0
    DRAW = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    ADJUST = 16  # penalties or logit bias
    LOGPROBS = 32


def draw(logits: Tensor, finite: Tensor, rows: Tensor, lens: Tensor, table: SamplingRows, wants: Wants) -> Tensor:
    """Draw one token per row of logits [D, V] float32 -> ids [D] int64; 0 where not `finite` [D] bool.

    `rows` [D] say where in `table` the parameters are; `lens` [D] are the positions of the tokens drawn, which together
    with the row's seed determine the random number. `wants` is the union of what the rows want.
    """
    vocab_size = logits.shape[1]
    size = max(1, _BLOCK_ELEMENTS // vocab_size)
    uniform = uniforms(table.seed.index_select(0, rows), lens)
    blocks = []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        kept = keep_likely(probabilities(logits[part], finite[part], rows[part], table), rows[part], table, wants)
        blocks.append(_invert(kept, uniform[part]))
    ids = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return torch.where(finite, ids, 0)


def probabilities(logits: Tensor, finite: Tensor, rows: Tensor, table: SamplingRows) -> Tensor:
    """softmax(logits / temperature) [D, V]; a row that is not finite becomes all ones, which harms nobody."""
    # The smallest temperatures are 0 in float32 or would make logits infinite: the maximum is taken off first.
    temperature = table.temperature.index_select(0, rows).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature.unsqueeze(1))
    return scaled.softmax(dim=-1).masked_fill_(~finite.unsqueeze(1), 1.0)


def keep_likely(p: Tensor, rows: Tensor, table: SamplingRows, wants: Wants) -> Tensor:
    """Zero all of p [D, V] that top-k, then top-p of what is left, then min-p exclude. Not normalized afterwards.

    Ties with the least likely token that is kept are kept, so that the order of token ids decides nothing.
    """
    if wants & Wants.TOP_K:
        k = table.top_k.index_select(0, rows)
        least = _smallest_kept(p, torch.ones_like(p), k.double(), relative=False)
        p = _cut(p, torch.where(k > 0, least, 0.0))
    if wants & Wants.TOP_P:
        top_p = table.top_p.index_select(0, rows)
        least = _smallest_kept(p, p, top_p.double(), relative=True)
        p = _cut(p, torch.where(top_p < 1, least, 0.0))
    if wants & Wants.MIN_P:
        p = _cut(p, table.min_p.index_select(0, rows) * p.amax(dim=-1))
    return p


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number of [0, 1) per (seed, position), float64 with 53 random bits.

    splitmix64's finalizer over a Weyl sequence keyed by the seed (Steele, Lea and Flood, OOPSLA 2014, section 5).
    Integers wrap in int64, where a right shift must drop the copies of the sign.
    """
    x = _mix(seeds + _signed(0x9E3779B97F4A7C15)) + positions * _signed(0x9E3779B97F4A7C15)
    return _shift(_mix(x), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _cut(p: Tensor, least: Tensor) -> Tensor:
    return p.masked_fill(p < least.unsqueeze(1), 0.0)


def _smallest_kept(p: Tensor, weight: Tensor, target: Tensor, *, relative: bool) -> Tensor:
    """The largest value t [D] such that the entries p >= t weigh at least `target` [D] (times the whole weight where
    `relative`); 0 where all of them together do not.

    Instead of sorting (2.5 ms per row of 49,152 on one core) the weights are added up by the upper half of the bits of
    p, and within the bin where the target is met by the lower half: positive floats order as their bits do.
    """
    bits = p.view(torch.int32)
    upper, lower = (bits >> 16).long(), (bits & 0xFFFF).long()
    weight = weight.double()
    above = _sums_from_top(upper, weight, _BINS)
    if relative:
        target = target * above[:, -1]
    coarse, missing = _where_met(above, target)
    within = weight.masked_fill_(upper != coarse.unsqueeze(1), 0.0)
    fine, _ = _where_met(_sums_from_top(lower, within, _FINE_BINS), missing)
    return ((coarse << 16) | fine).to(torch.int32).view(torch.float32)


def _sums_from_top(bins: Tensor, weight: Tensor, num_bins: int) -> Tensor:
    """[D, num_bins]: entry j is the weight in the j + 1 highest bins."""
    sums = weight.new_zeros(weight.shape[0], num_bins)
    return sums.scatter_add_(1, (num_bins - 1) - bins, weight).cumsum(dim=1)


def _where_met(above: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The bin [D] in which the sums reach `target`, and what the bins above it leave to be found in it."""
    num_bins = above.shape[1]
    place = torch.searchsorted(above, target.unsqueeze(1)).clamp_(max=num_bins - 1)
    before = above.gather(1, (place - 1).clamp_(min=0)).masked_fill_(place == 0, 0.0)
    return (num_bins - 1) - place.squeeze(1), target - before.squeeze(1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of weights [D, V] first exceeds uniform [D] times their total.

    An excluded token adds nothing to the sum, so it cannot be where the sum first exceeds anything.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1]
    aim = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, aim.unsqueeze(1), right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
