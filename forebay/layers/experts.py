"""The experts of a layer, or a rank's part of each of them.

Shape letters: T tokens, H hidden size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forebay.layers.build import Parts
from forebay.ops import ExpertActivation, LinearWeight


class ExpertLayers:
    """Experts of two linear layers each. Of ranks, each has a run of the outputs of both layers of every expert."""

    def __init__(
        self,
        parts: Parts,
        before: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
        offset: float = 1.0,
    ) -> None:
        self._ops, self._exchange = parts.ops.experts, parts.share.exchange
        self._is_part = parts.share.size > 1
        self._experts = self._ops.pack_experts(before, down, activation, alpha=alpha, limit=limit, offset=offset)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids [T, k] int64 and weights [T, k] float32 of the chosen experts -> [T, H]."""
        if not self._is_part:
            return self._ops.fused_experts(x, self._experts, ids, weights)
        inner = self._exchange.gather(self._ops.experts_inside(x, self._experts, ids))
        return self._exchange.gather(self._ops.experts_outside(inner, self._experts, ids, weights))
