"""Biases that heads add to the scores of two tokens by their distance, and attention with them.

Shape letters: T tokens of all texts of a step, L longest text, Hq heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.ops.reference.attention import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBiasSpec:
    """A table of 32 rows, which each head adds to a score by the distance of two tokens; half of them are for tokens in
    front. Distances up to 7 have a row each, longer ones share one by their logarithm up to 128 (T5, arXiv 1910.10683,
    section 2.1)."""

    name: str
    num_heads: int

    def build(self, parts: Parts, num_positions: int) -> Tensor:
        """Return the bias of each head at distances from 1 - num_positions to num_positions - 1, [Hq, 2 L - 1]
        float32."""
        apart = torch.arange(1 - num_positions, num_positions)
        far = 8 + (torch.log(apart.abs().clamp(min=1).float() / 8) / math.log(16) * 8).long()
        rows = torch.where(apart.abs() < 8, apart.abs(), far.clamp(max=15)) + 16 * (apart > 0)
        return parts.tensor(
            f"{self.name}.weight", 32, self.num_heads, float32=True, change=lambda table: table[rows].T.contiguous()
        )


def biased_attention(q: Tensor, cache: KvCache, q_start: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """Attention of each token over its text with a bias by distance: q [T, Hq, D] over k and v [T, Hq, D] -> [T, Hq,
    D].

    bias [Hq, 2 L - 1] has, for a key j behind query i, what is added to its score at L - 1 + j - i. Computed text by
    text, in float32.
    """
    out, middle, starts = torch.empty_like(q), bias.shape[1] // 2, q_start.tolist()
    for first, end in pairwise(starts):
        places = torch.arange(end - first, device=q.device)
        own = bias[:, middle + places - places.unsqueeze(1)]
        queries, keys, values = (each[first:end].transpose(0, 1).float().contiguous() for each in (q, cache.k, cache.v))
        weights = (queries @ keys.transpose(1, 2) * scale + own).softmax(dim=-1)
        out[first:end] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
