"""Routers: which experts a token goes to, and how much each of them counts.

Shape letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.ops import Gating


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """`gating` chooses from the outputs of the linear layer `name`, one for each expert; `correction` is the name of
    what it adds to the scores for the choice alone, "" for nothing."""

    name: str
    hidden_size: int
    num_experts: int
    gating: Gating
    bias: bool = False
    correction: str = ""


class Router:
    def __init__(self, spec: RouterSpec, parts: Parts) -> None:
        self._ops, self._gating = parts.ops, spec.gating
        count, name = spec.num_experts, spec.correction
        self._logits = parts.linear({spec.name: count}, spec.hidden_size, bias=spec.bias, min_bits=16).weight
        self._correction = parts.tensor(name, count, float32=True) if name else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts' numbers [T, k] int64 and their weights [T, k] float32."""
        return self._ops.topk_gating(self._ops.linear_f32(x, self._logits), self._gating, self._correction)
