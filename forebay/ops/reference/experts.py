"""The ops that run many small linear layers at once: mixtures of experts, their routing, and one layer per head. What
each does for every backend, and its definition in torch.

Shape letters: T tokens, H hidden size, E experts, k experts per token, Hq heads, N and K a layer's outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.reference.elementwise import ElementwiseOps


class Scoring(StrEnum):
    """How a router's logits become the experts' scores: over all experts, or each by itself."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """How a token's experts are chosen by their scores, and how each of them is weighted.

    With several `groups` of experts, which divide them evenly, a token's experts come from the best `best_groups` by
    the sum of each group's `summed` best: two (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) or one (DeepSeek-V2, arXiv
    2405.04434, section 2.1.2). `normalize`: the chosen scores are divided by their sum, or by `least_sum` if that is
    more, plus `epsilon`. Then they are multiplied by `scale`.
    """

    num_experts_per_tok: int
    scoring: Scoring
    normalize: bool
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    least_sum: float = 0.0
    summed: int = 2


class ExpertActivation(StrEnum):
    """The op between an expert's two layers."""

    SILU_AND_MUL = "silu_and_mul"
    CLAMPED_SWIGLU = "clamped_swiglu"
    RELU2 = "relu2"
    GELU_AND_MUL = "gelu_and_mul"  # in its tanh form


class Experts:
    """E experts in the form their backend reads fastest; only the `Ops` that packed them can use them."""

    __slots__ = ()


class HeadWeights:
    """One linear layer for each head; only the `Ops` that packed them can use them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TorchExperts(Experts):
    """The experts of one layer as separate linear layers, and the activation between the two of each expert."""

    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    activate: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TorchHeads(HeadWeights):
    """The weights of one linear layer per head, each packed by `LinearOps.pack`."""

    weights: Sequence[LinearWeight]


class ExpertOps:
    """Mixtures of experts, their routing, and one linear layer per head, defined in torch by the ops for one linear
    layer and for activations."""

    def __init__(self, linear: LinearOps, elementwise: ElementwiseOps) -> None:
        self._linear, self._elementwise = linear, elementwise

    def topk_gating(
        self, logits: Tensor, gating: Gating, correction: Tensor | None = None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts, the best first, and their weights: logits [T, E] float32 -> [T, k] int64 and [T, k]
        float32.

        `correction` [E] float32 is added to the scores for the choice alone; what an expert weighs is in the end
        multiplied by its own of `factors` [E] float32. Of equal ones the first is chosen, and NaN
        last; every id is one of E, whatever the logits.
        """
        scores = _scores(logits, gating.scoring)
        chosen_by = (scores if correction is None else scores + correction).nan_to_num(nan=float("-inf"))
        if gating.groups > 1:
            chosen_by = _within_best_groups(chosen_by, gating)
        ids = _best(chosen_by, gating.num_experts_per_tok)
        weights = _weights(scores, ids, gating)
        return ids, weights if factors is None else weights * factors[ids]

    def hash_gating(self, logits: Tensor, token_ids: Tensor, table: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        """Each token's experts by its id alone, and their weights by logits [T, E] float32 -> as `topk_gating`.

        token_ids [T] int64; table [V, k] int64. DeepSeek-V4, section 2.1 (hash routing).
        """
        ids = table.index_select(0, token_ids)
        return ids, _weights(_scores(logits, gating.scoring), ids, gating)

    def sparse_mixer(self, logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        """Each token's two best experts, and their weights: logits [T, E] float32 -> [T, 2] int64 and [T, 2] float32.

        An expert weighs its share of the softmax over those that are at most 2 jitter below it, relative to the greater
        of its logit and their size; the second one without the first. NaN is chosen last. SparseMixer-v2, arXiv
        2409.12136, as transformers evaluates it.
        """
        ids = _best(logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), 2)
        first = logits.masked_fill(_far_below(logits, ids[:, :1], jitter), float("-inf"))
        others = logits.scatter(1, ids[:, :1], float("-inf"))
        second = others.masked_fill(_far_below(logits, ids[:, 1:], jitter), float("-inf"))
        shares = [each.softmax(dim=-1).gather(1, ids[:, i : i + 1]) for i, each in enumerate((first, second))]
        return ids, torch.cat(shares, dim=1)

    def pack_experts(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
        offset: float = 1.0,
    ) -> Experts:
        """E experts, all of the same shapes: down[e](activation(gate_up[e](x))). Keeps the weights. `alpha`, `limit`
        and `offset` are those of `clamped_swiglu`."""
        return TorchExperts(tuple(gate_up), tuple(down), self._activation(activation, alpha, limit, offset))

    def _activation(
        self, name: ExpertActivation, alpha: float, limit: float, offset: float
    ) -> Callable[[Tensor], Tensor]:
        activations: dict[ExpertActivation, Callable[[Tensor], Tensor]] = {
            ExpertActivation.SILU_AND_MUL: self._elementwise.silu_and_mul,
            ExpertActivation.CLAMPED_SWIGLU: partial(
                self._elementwise.clamped_swiglu, alpha=alpha, limit=limit, offset=offset
            ),
            ExpertActivation.RELU2: self._elementwise.relu2,
            ExpertActivation.GELU_AND_MUL: self._elementwise.gelu_and_mul,
        }
        return activations[name]

    def fused_experts(self, x: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """A mixture of experts: sum over j of topk_weights[t, j] * expert[topk_ids[t, j]](x[t]), x [T, H] -> [T, H].

        topk_ids [T, k] int64, topk_weights [T, k] float32. What an expert gives is rounded to x's dtype; the sum is in
        float32 in the order of j, rounded once.
        """
        assert isinstance(experts, TorchExperts), type(experts)
        per_choice = x.new_zeros(*topk_ids.shape, x.shape[1])
        for e in sorted(set(topk_ids.flatten().tolist())):
            token, choice = torch.where(topk_ids == e)
            hidden = experts.activate(self._linear.apply(x[token], experts.gate_up[e]))
            per_choice[token, choice] = self._linear.apply(hidden, experts.down[e])
        return (per_choice.float() * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def experts_inside(self, x: Tensor, experts: Experts, topk_ids: Tensor) -> Tensor:
        """The part of `fused_experts` up to the activation: x [T, H] -> its outputs [T * k, I], in the order of the
        experts. Ranks have a part of an expert's outputs each, I of them."""
        assert isinstance(experts, TorchExperts), type(experts)
        by_expert = [x[torch.where(topk_ids == e)[0]] for e in range(len(experts.down))]
        inner = [
            experts.activate(self._linear.apply(rows, weight))
            for rows, weight in zip(by_expert, experts.gate_up, strict=True)
        ]
        return torch.cat(inner)

    def experts_outside(self, inner: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The rest of `fused_experts` behind the activation, whose outputs are inner [T * k, I] -> [T, N], the outputs
        that a rank has."""
        assert isinstance(experts, TorchExperts), type(experts)
        per_choice = inner.new_zeros(*topk_ids.shape, experts.down[0].out_features)
        first = 0
        for e, weight in enumerate(experts.down):
            token, choice = torch.where(topk_ids == e)
            per_choice[token, choice] = self._linear.apply(inner[first : first + len(token)], weight)
            first += len(token)
        return (per_choice.float() * topk_weights.unsqueeze(-1)).sum(dim=1).to(inner.dtype)

    def pack_heads(self, weights: Sequence[LinearWeight]) -> HeadWeights:
        """One layer for each head, all of the same shape. Keeps them."""
        return TorchHeads(tuple(weights))

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        """Apply the linear layer of each head: x [T, Hq, K], which may be a view into wider rows -> [T, Hq, N]."""
        assert isinstance(heads, TorchHeads), type(heads)
        return torch.stack([self._linear.apply(x[:, h], weight) for h, weight in enumerate(heads.weights)], dim=1)


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case Scoring.SOFTMAX:
            return logits.softmax(dim=-1)
        case Scoring.SIGMOID:
            return logits.sigmoid()
        case Scoring.SQRT_SOFTPLUS:
            return torch.nn.functional.softplus(logits).sqrt()


def _far_below(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """Return which logits [T, E] are more than 2 jitter below that of the one `chosen` [T, 1]."""
    top = logits.gather(1, chosen)
    return (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter


def _weights(scores: Tensor, ids: Tensor, gating: Gating) -> Tensor:
    weights = scores.gather(1, ids)
    if gating.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True).clamp(min=gating.least_sum) + gating.epsilon)
    return weights * gating.scale


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the top entries of the last dimension: the best first, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _within_best_groups(scores: Tensor, gating: Gating) -> Tensor:
    """scores [T, E], minus infinity where a token's expert is in none of its best groups."""
    grouped = scores.view(len(scores), gating.groups, scores.shape[1] // gating.groups)
    best = _best(grouped.topk(gating.summed, dim=-1).values.sum(dim=-1), gating.best_groups)
    out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, value=False)
    return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).view_as(scores)
