"""The experts of gpt-oss, with biases and a clamped activation.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.routing import Router, RouterSpec
from forebay.ops import ExpertActivation


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedMoeSpec:
    """`alpha` and `limit` are those of `ElementwiseOps.clamped_swiglu`."""

    name: str
    router: RouterSpec
    intermediate_size: int
    alpha: float
    limit: float

    def build(self, parts: Parts) -> ClampedMoe:
        return ClampedMoe(self, parts)


class ClampedMoe:
    """Mixture of experts of gpt-oss; x [T, H] -> [T, H]."""

    def __init__(self, spec: ClampedMoeSpec, parts: Parts) -> None:
        ops = self._ops = parts.ops
        self._router = Router(spec.router, parts)
        size, inner = spec.router.hidden_size, spec.intermediate_size
        experts = [parts.without_adapters.within(f"{spec.name}.{expert}") for expert in range(spec.router.num_experts)]
        before = [own.linear({"gate_proj": inner, "up_proj": inner}, size, bias=True).weight for own in experts]
        down = [own.linear({"down_proj": size}, inner, bias=True).weight for own in experts]
        self._experts = ops.experts.pack_experts(
            before, down, ExpertActivation.CLAMPED_SWIGLU, alpha=spec.alpha, limit=spec.limit
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._ops.experts.fused_experts(x, self._experts, *self._router(ctx, x))
