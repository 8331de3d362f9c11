"""Biases that heads add to the scores of two tokens by their distance, and attention with them.

Shape letters: T tokens of all texts of a step, L longest text, Hq heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.ops.reference.attention import KvCache

_QUERIES: Final = 128  # whose scores are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBiasSpec:
    """A table of 32 rows, which each head adds to a score by the distance of two tokens; half of them are for tokens in
    front. Distances up to 7 have a row each, longer ones share one by their logarithm up to 128 (T5, arXiv 1910.10683,
    section 2.1)."""

    name: str
    num_heads: int

    @property
    def equation(self) -> str:
        """Return what is added to scores."""
        return f"bias[distance]  (32 x {self.num_heads})"

    def build(self, parts: Parts, num_positions: int) -> Tensor:
        """Return the bias of each head at distances from 1 - num_positions to num_positions - 1, [Hq, 2 L - 1]
        float32."""
        apart = torch.arange(1 - num_positions, num_positions)
        far = 8 + (torch.log(apart.abs().clamp(min=1).float() / 8) / math.log(16) * 8).long()
        rows = torch.where(apart.abs() < 8, apart.abs(), far.clamp(max=15)) + 16 * (apart > 0)
        return parts.tensor(
            f"{self.name}.weight", 32, self.num_heads, float32=True, change=lambda table: table[rows].T.contiguous()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """A head's slope times the distance of two tokens, to either side, less from a score (ALiBi, arXiv 2108.12409,
    section 3; both sides alike in arXiv 2310.19923, section 3.1).

    Of a power of two heads the slopes are 2 ** (-8 n / heads), n from 1 on. Of another number the first are those of
    the power of two below it; the others are every second one of twice that power.
    """

    num_heads: int

    @property
    def equation(self) -> str:
        """Return what is added to scores."""
        first, last = self.slopes[0], self.slopes[-1]
        return f"-slope distance  ({self.num_heads} slopes, from {first:.4g} to {last:.4g})"

    @property
    def slopes(self) -> list[float]:
        """Return the slope of each head."""
        below = 1 << (self.num_heads.bit_length() - 1)
        odd = range(1, 2 * (self.num_heads - below), 2)
        return [2.0 ** (-8 * n / below) for n in range(1, below + 1)] + [2.0 ** (-4 * n / below) for n in odd]

    def build(self, parts: Parts, num_positions: int) -> Tensor:
        """Return the bias of each head at distances from 1 - num_positions to num_positions - 1, [Hq, 2 L - 1]
        float32."""
        apart = torch.arange(1 - num_positions, num_positions, device=parts.weights.device).abs()
        return -torch.tensor(self.slopes, device=apart.device).unsqueeze(1) * apart


ScoreBiasSpec = DistanceBiasSpec | AlibiSpec


def biased_attention(q: Tensor, cache: KvCache, q_start: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """Attention of each token over its text with a bias by distance: q [T, Hq, D] over k and v [T, Hq, D] -> [T, Hq,
    D].

    bias [Hq, 2 L - 1] has, for a key j behind query i, what is added to its score at L - 1 + j - i. Computed text by
    text, in float32, so many queries at a time that scores take few MiB of a long text.
    """
    out, middle, starts = torch.empty_like(q), bias.shape[1] // 2, q_start.tolist()
    for first, end in pairwise(starts):
        places = torch.arange(end - first, device=q.device)
        queries, keys, values = (each[first:end].transpose(0, 1).float().contiguous() for each in (q, cache.k, cache.v))
        for at in range(0, end - first, _QUERIES):
            some = slice(at, at + _QUERIES)
            own = bias[:, middle + places - places[some].unsqueeze(1)]
            weights = (queries[:, some] @ keys.transpose(1, 2) * scale + own).softmax(dim=-1)
            out[first:end][some] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
