"""The ops that run many small linear layers at once: mixtures of experts, their routing, and one layer per head.

Shape letters: T tokens, H hidden size, E experts, k experts per token, Hq heads, N and K a layer's outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from forebay.ops.linear import LinearWeight


class Scoring(StrEnum):
    """How a router's logits become the experts' scores: over all experts, or each by itself."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """How a token's experts are chosen by their scores, and how each of them is weighted.

    With several `groups` of experts, which divide them evenly, a token's experts come from the best `best_groups` by
    the sum of each group's two best (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). `normalize`: the chosen scores are
    divided by their sum plus `epsilon`. Then they are multiplied by `scale`.
    """

    num_experts_per_tok: int
    scoring: Scoring
    normalize: bool
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1


class ExpertActivation(StrEnum):
    """The op between an expert's two layers."""

    SILU_AND_MUL = "silu_and_mul"
    CLAMPED_SWIGLU = "clamped_swiglu"
    RELU2 = "relu2"


class Experts(Protocol):
    """E experts in the form their backend reads fastest; only the `Ops` that packed them can use them."""

    @property
    def num_experts(self) -> int: ...


class HeadWeights(Protocol):
    """One linear layer for each head; only the `Ops` that packed them can use them."""

    @property
    def num_heads(self) -> int: ...


class ExpertOps(Protocol):
    def topk_gating(self, logits: Tensor, gating: Gating, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Each token's experts, the best first, and their weights: logits [T, E] float32 -> [T, k] int64 and [T, k]
        float32.

        `correction` [E] float32 is added to the scores for the choice alone. Of equal ones the first is chosen, and NaN
        last; every id is one of E, whatever the logits.
        """
        ...

    def pack_experts(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> Experts:
        """E experts, all of the same shapes: down[e](activation(gate_up[e](x))). Keeps the weights. `alpha` and `limit`
        are those of `clamped_swiglu`."""
        ...

    def fused_experts(self, x: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """A mixture of experts: sum over j of topk_weights[t, j] * expert[topk_ids[t, j]](x[t]), x [T, H] -> [T, H].

        topk_ids [T, k] int64, topk_weights [T, k] float32. What an expert gives is rounded to x's dtype; the sum is in
        float32 in the order of j, rounded once.
        """
        ...

    def pack_heads(self, weights: Sequence[LinearWeight]) -> HeadWeights:
        """One layer for each head, all of the same shape. Keeps them."""
        ...

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        """`linear` of each head by its own weight: x [T, Hq, K], which may be a view into wider rows -> [T, Hq, N]."""
        ...
