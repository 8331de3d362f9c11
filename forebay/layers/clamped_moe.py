"""The experts of gpt-oss, with biases and a clamped activation.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.experts import ExpertLayers
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
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> ClampedMoe:
        return ClampedMoe(self, parts)


class ClampedMoe:
    """Mixture of experts of gpt-oss; x [T, H] -> [T, H]."""

    def __init__(self, spec: ClampedMoeSpec, parts: Parts) -> None:
        self._router = Router(spec.router, parts)
        size, inner = spec.router.hidden_size, spec.intermediate_size
        experts = [parts.without_adapters.within(f"{spec.name}.{expert}") for expert in range(spec.router.num_experts)]
        inside, outputs = parts.share.of(inner, "inner outputs of experts"), {"gate_proj": inner, "up_proj": inner}
        rows = parts.share.part(inside, range(inner + inside.start, inner + inside.stop))
        before = [own.linear(outputs, size, bias=True, own=rows).weight for own in experts]
        down = [own.gathered("down_proj", size, inner, bias=True).weight for own in experts]
        activation = ExpertActivation.CLAMPED_SWIGLU
        self._experts = ExpertLayers(parts, before, down, activation, alpha=spec.alpha, limit=spec.limit)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._experts(x, *self._router(ctx, x))
