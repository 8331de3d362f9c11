"""The definition in torch of the ops in experts.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forebay.ops.experts import ExpertActivation, Experts, Gating, HeadWeights, Scoring
from forebay.ops.linear import LinearWeight
from forebay.ops.reference_elementwise import TorchElementwise
from forebay.ops.reference_linear import TorchLinear


@dataclass(frozen=True, slots=True)
class TorchExperts:
    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    activate: Callable[[Tensor], Tensor]

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)


@dataclass(frozen=True, slots=True)
class TorchHeads:
    weights: Sequence[LinearWeight]

    @property
    def num_heads(self) -> int:
        return len(self.weights)


class TorchExpertOps(TorchLinear, TorchElementwise):
    """See `ExpertOps`."""

    def topk_gating(self, logits: Tensor, gating: Gating, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(dim=-1) if gating.scoring is Scoring.SOFTMAX else logits.sigmoid()
        chosen_by = (scores if correction is None else scores + correction).nan_to_num(nan=float("-inf"))
        if gating.groups > 1:
            chosen_by = _within_best_groups(chosen_by, gating)
        ids = _best(chosen_by, gating.num_experts_per_tok)
        weights = scores.gather(1, ids)
        if gating.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + gating.epsilon)
        return ids, weights * gating.scale

    def pack_experts(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> TorchExperts:
        activate: dict[ExpertActivation, Callable[[Tensor], Tensor]] = {
            ExpertActivation.SILU_AND_MUL: self.silu_and_mul,
            ExpertActivation.CLAMPED_SWIGLU: partial(self.clamped_swiglu, alpha=alpha, limit=limit),
            ExpertActivation.RELU2: self.relu2,
        }
        return TorchExperts(tuple(gate_up), tuple(down), activate[activation])

    def fused_experts(self, x: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        assert isinstance(experts, TorchExperts), type(experts)
        per_choice = x.new_zeros(*topk_ids.shape, x.shape[1])
        for e in sorted(set(topk_ids.flatten().tolist())):
            token, choice = torch.where(topk_ids == e)
            hidden = experts.activate(self.linear(x[token], experts.gate_up[e]))
            per_choice[token, choice] = self.linear(hidden, experts.down[e])
        return (per_choice.float() * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def pack_heads(self, weights: Sequence[LinearWeight]) -> TorchHeads:
        return TorchHeads(tuple(weights))

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        assert isinstance(heads, TorchHeads), type(heads)
        return torch.stack([self.linear(x[:, h], weight) for h, weight in enumerate(heads.weights)], dim=1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Of the last dimension: the best first, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _within_best_groups(scores: Tensor, gating: Gating) -> Tensor:
    """scores [T, E], minus infinity where a token's expert is in none of its best groups."""
    grouped = scores.view(len(scores), gating.groups, scores.shape[1] // gating.groups)
    best = _best(grouped.topk(2, dim=-1).values.sum(dim=-1), gating.best_groups)
    out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, value=False)
    return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).view_as(scores)
