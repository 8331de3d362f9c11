"""Routers: which experts a token goes to, and how much each of them counts.

Shape letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.params import LinearParam, TensorParam, linear, vector


class Router(Protocol):
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts' numbers [T, k] int64 and their weights [T, k] float32."""
        ...


class RouterSpec(Protocol):
    def params(self) -> tuple[TensorParam, ...]: ...

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

    @property
    def logits(self) -> LinearParam:
        return linear([self.name], [self.num_experts], self.hidden_size, bias=self.bias)

    def params(self) -> tuple[TensorParam, ...]:
        return self.logits.tensors()

    def build(self, parts: Parts) -> SoftmaxRouter:
        return SoftmaxRouter(self, parts)


class SoftmaxRouter:
    def __init__(self, spec: SoftmaxRouterSpec, parts: Parts) -> None:
        self._spec = spec
        self._ops = parts.ops
        self._logits = parts.weights.linear(spec.logits)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self._ops.linear_f32(x, self._logits).softmax(dim=-1)
        weights, ids = probabilities.topk(self._spec.num_experts_per_tok, dim=-1)
        return ids, weights / weights.sum(dim=-1, keepdim=True) if self._spec.normalize else weights


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidRouterSpec:
    """The k best experts by a logistic function of each one's logit, plus the entry of `correction` where that names a
    tensor: it helps to choose and does not count. `normalize`: the weights are divided by their sum plus `epsilon`;
    then they are multiplied by `scale`. With several `groups` of experts, these are chosen from the best `best_groups`
    by the sum of each group's two best, as DeepSeek-V3 does (arXiv 2412.19437, section 2.1.2)."""

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

    @property
    def logits(self) -> LinearParam:
        return linear([self.name], [self.num_experts], self.hidden_size, bias=False)

    @property
    def corrections(self) -> TensorParam:
        return vector(self.correction, self.num_experts)

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.logits.tensors(), *((self.corrections,) if self.correction else ()))

    def build(self, parts: Parts) -> SigmoidRouter:
        return SigmoidRouter(self, parts)


class SigmoidRouter:
    def __init__(self, spec: SigmoidRouterSpec, parts: Parts) -> None:
        self._spec = spec
        self._ops = parts.ops
        self._logits = parts.weights.linear(spec.logits)
        self._corrections = parts.weights.tensor(spec.corrections, float32=True) if spec.correction else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._spec
        logits = self._ops.linear_f32(x, self._logits)
        # torch's own sigmoid gives other bits to the last few entries of a tensor than to the rest: to other tokens.
        scores = self._ops.mul_sigmoid(torch.ones_like(logits), logits)
        chosen_by = scores if self._corrections is None else scores + self._corrections
        if spec.groups > 1:
            chosen_by = self._within_best_groups(chosen_by)
        ids = chosen_by.topk(spec.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, ids)
        if spec.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + spec.epsilon)
        return ids, weights * spec.scale

    def _within_best_groups(self, scores: Tensor) -> Tensor:
        """scores [T, E], minus infinity where a token's expert is in none of its best groups."""
        spec = self._spec
        grouped = scores.view(len(scores), spec.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(spec.best_groups, dim=-1).indices
        out = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, value=False)
        return grouped.masked_fill(out.unsqueeze(-1), float("-inf")).view_as(scores)
