"""Routers: which experts a token goes to, and how much each of them counts.

Shape letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.ops import Gating, Ops, Scoring


class Router(Protocol):
    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts' numbers [T, k] int64 and their weights [T, k] float32."""
        ...


class RouterSpec(Protocol):
    def build(self, parts: Parts) -> Router: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxRouterSpec:
    """The k most likely experts by a softmax over all; `normalize`: their weights are scaled to sum to one, as if the
    softmax had been over the k alone."""

    name: str
    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    normalize: bool
    bias: bool = False

    def build(self, parts: Parts) -> TopkRouter:
        gating = Gating(num_experts_per_tok=self.num_experts_per_tok, scoring=Scoring.SOFTMAX, normalize=self.normalize)
        logits = parts.linear({self.name: self.num_experts}, self.hidden_size, bias=self.bias, min_bits=16)
        return TopkRouter(parts.ops, logits, gating, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidRouterSpec:
    """The k best experts by sigmoid(logit), plus the entry of `correction` where that names a tensor: it takes part in
    the choice and not in the weight. `normalize`: the weights are divided by their sum plus `epsilon`; then they are
    multiplied by `scale`. With several `groups` of experts, these are chosen from the best `best_groups` by the sum of
    each group's two best, as DeepSeek-V3 does (arXiv 2412.19437, section 2.1.2)."""

    name: str
    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    normalize: bool
    correction: str = ""
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1

    def build(self, parts: Parts) -> TopkRouter:
        gating = Gating(
            num_experts_per_tok=self.num_experts_per_tok,
            scoring=Scoring.SIGMOID,
            normalize=self.normalize,
            epsilon=self.epsilon,
            scale=self.scale,
            groups=self.groups,
            best_groups=self.best_groups,
        )
        logits = parts.linear({self.name: self.num_experts}, self.hidden_size, min_bits=16)
        correction = parts.tensor(self.correction, self.num_experts, float32=True) if self.correction else None
        return TopkRouter(parts.ops, logits, gating, correction)


class TopkRouter:
    def __init__(self, ops: Ops, logits: Linear, gating: Gating, correction: Tensor | None) -> None:
        self._ops = ops
        self._logits = logits.weight
        self._gating = gating
        self._correction = correction

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.topk_gating(self._ops.linear_f32(x, self._logits), self._gating, self._correction)
