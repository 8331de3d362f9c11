"""The experts of gpt-oss: all in one tensor each, gate and up in turns, with biases and a clamped activation.

Shape letters: T tokens, H hidden size, I intermediate size, E experts.
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
    """`alpha` and `limit` are those of `Ops.clamped_swiglu`."""

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
        count, size, outputs = spec.router.num_experts, spec.router.hidden_size, 2 * spec.intermediate_size
        parts = parts.within(spec.name)
        # Weights [E, H, 2I], whose outputs are the first gate, the first up, the second gate.., and biases [E, 2I].
        weights = _halves_from_turns(parts.values("gate_up_proj", count, size, outputs))
        biases = _halves_from_turns(parts.values("gate_up_proj_bias", count, outputs))
        gate_up = [ops.pack_linear(w.T.contiguous(), b) for w, b in zip(weights, biases, strict=True)]
        weights = parts.values("down_proj", count, spec.intermediate_size, size)
        biases = parts.values("down_proj_bias", count, size)
        down = [ops.pack_linear(w.T.contiguous(), b) for w, b in zip(weights, biases, strict=True)]
        self._experts = ops.pack_experts(
            gate_up, down, ExpertActivation.CLAMPED_SWIGLU, alpha=spec.alpha, limit=spec.limit
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._ops.fused_experts(x, self._experts, *self._router(ctx, x))


def _halves_from_turns(x: Tensor) -> Tensor:
    """[.., 2I], the first of each pair before all the second ones."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
