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
    what it adds to the scores for the choice alone, "" for nothing, and `factors` of what experts' weights are
    multiplied by. With a `norm`, the name of its weight, the layer's input is normed; its outputs are multiplied by
    `scale`."""

    name: str
    hidden_size: int
    num_experts: int
    gating: Gating
    bias: bool = False
    correction: str = ""
    factors: str = ""
    norm: str = ""
    norm_eps: float = 0.0
    scale: float = 1.0


class Router:
    """Router of a mixture of experts."""

    def __init__(self, spec: RouterSpec, parts: Parts) -> None:
        self._ops, self._spec = parts.ops, spec
        count, size = spec.num_experts, spec.hidden_size
        self._logits = parts.linear({spec.name: count}, size, bias=spec.bias, min_bits=16).weight
        self._norm = parts.tensor(spec.norm, size) if spec.norm else None
        self._correction, self._factors = (
            parts.tensor(name, count, float32=True) if name else None for name in (spec.correction, spec.factors)
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts' numbers [T, k] int64 and their weights [T, k] float32."""
        ops, spec = self._ops, self._spec
        if self._norm is not None:
            x = ops.rms_norm(x, self._norm, spec.norm_eps)
        logits = ops.linear_f32(x, self._logits)
        if spec.scale != 1.0:
            ops.scale_(logits, spec.scale)
        return ops.topk_gating(logits, spec.gating, self._correction, self._factors)
