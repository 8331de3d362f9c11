"""The choice of a token in each row of logits: the ops' contracts, and their definitions in torch. No draw waits for
the device.

Of softmax(logits / temperature) the top_k most likely are kept. Of those the most likely that make up top_p of their
sum are kept, then of those all with at least min_p times the largest probability. Ties with the least likely that is
kept are kept: the order of ids decides nothing. The chosen token is the one at which the running sum of the kept
probabilities, in the order of ids, first exceeds `uniform` times the whole.

Shape letters: D rows that draw at random, V vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

_BLOCK_ELEMENTS: Final = 1 << 19  # of logits or bins at a time: intermediate results then stay within a few MiB
_BINS: Final = 1 << 15  # a probability's sign is 0, so its upper half has 15 bits
_FINE_BINS: Final = 1 << 16


class Draws(NamedTuple):
    """How a token of each row is drawn: the numbers with `draws` of `base.sampling` by their names, in their order,
    [S] float32 or int64, and uniform [S] float64 of [0, 1). None stands for a column in which every number is neutral:
    top_k 0, top_p 1 and min_p 0 keep all."""

    uniform: Tensor
    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class SamplingOps:
    """Checks of rows, and the most likely or a drawn token of each, defined in torch."""

    def finite_rows(self, x: Tensor) -> Tensor:
        """x [T, H] contiguous -> [T] bool: False for a row with a NaN or an infinity."""
        return x.isfinite().all(dim=-1)

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, V] float32 -> ids [S] int64 of each row's first maximum, and finite [S] bool.

        A row with a NaN or +inf, or with nothing but -inf, is not finite; its id is 0.
        """
        if logits.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        top = logits.amax(dim=-1)  # NaN if any entry is
        finite = top.isfinite()
        first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)
        return torch.where(finite, first, torch.zeros_like(first)), finite

    def mask_logits(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        """logits [S, V] float32 become -inf in place, in row at[n] where bit j % 32 of words[n, j // 32] is not set.

        at [N] int64, each row once; words [N, V / 32, rounded up] int32, contiguous.
        """
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        may = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[at] = logits[at].masked_fill(~may, -torch.inf)

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw one token per row of logits [S, V] float32 -> ids [S] int64, as this module defines it; 0 for a row
        that is not finite."""
        return sample_rows(logits, draws)


def sample_rows(logits: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row of logits [S, V] float32 -> ids [S] int64; 0 for a row that is not finite."""
    num_rows, vocab_size = logits.shape
    size = max(1, _BLOCK_ELEMENTS // max(vocab_size, _FINE_BINS))
    blocks = [draws.uniform.new_empty(0, dtype=torch.int64)]
    for start in range(0, num_rows, size):
        part = slice(start, start + size)
        top = logits[part].amax(dim=-1, keepdim=True)  # NaN if any entry is
        finite = top.isfinite()
        columns = (None if column is None else column[part] for column in draws[2:])
        p = _probabilities(logits[part], top, finite, draws.temperature[part])
        kept = _keep_likely(p, *columns)
        blocks.append(torch.where(finite.squeeze(1), _invert(kept, draws.uniform[part]), 0))
    return torch.cat(blocks)


def _probabilities(logits: Tensor, top: Tensor, finite: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature) [D, V]; a row that is not finite becomes all ones, whose result is not used."""
    # The smallest temperatures are 0 in float32 or would make logits infinite: the maximum is taken off first.
    scaled = (logits - top).div_(temperature.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
    return scaled.softmax(dim=-1).masked_fill_(~finite, 1.0)


def _keep_likely(p: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Zero all of p [D, V] that top-k, then top-p of the rest, then min-p exclude. Not normalized afterwards."""
    if top_k is not None:
        least = _smallest_kept(p, torch.ones_like(p), top_k.double(), relative=False)
        p = _cut(p, torch.where(top_k > 0, least, 0.0))
    if top_p is not None:
        least = _smallest_kept(p, p, top_p.double(), relative=True)
        p = _cut(p, torch.where(top_p < 1, least, 0.0))
    return p if min_p is None else _cut(p, min_p * p.amax(dim=-1))


def _cut(p: Tensor, least: Tensor) -> Tensor:
    return p.masked_fill(p < least.unsqueeze(1), 0.0)


def _smallest_kept(p: Tensor, weight: Tensor, target: Tensor, *, relative: bool) -> Tensor:
    """Return the largest value t [D] such that the entries p >= t weigh at least `target` [D] (times the whole weight
    if `relative`); 0 if all of them together do not.

    Instead of sorting (2.5 ms per row of 49,152 on one core) the weights are added up by the upper half of the bits of
    p. Within the bin in which the target is met they are added up by the lower half: positive floats order as their
    bits do.
    """
    bits = p.view(torch.int32)
    upper, lower = (bits >> 16).long(), (bits & 0xFFFF).long()
    weight = weight.double()
    above = _sums_from_top(upper, weight, _BINS)
    if relative:
        target = target * above[:, -1]
    # A target of 0, as the smallest top-p are in float32, would be met above the largest entry.
    coarse, missing = _where_met(above, target.clamp(min=torch.finfo(torch.float64).tiny))
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
