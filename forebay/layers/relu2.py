"""Feed-forward layers without a gate, whose activation is the square of a ReLU (Nemotron-H): one for all tokens, or a
mixture of experts beside a shared one.

Primer, arXiv 2109.08668, section 4.1. Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.routing import RouterSpec
from forebay.ops import ExpertActivation


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu2MlpSpec:
    name: str
    hidden_size: int
    intermediate_size: int
    bias: bool = False

    def build(self, parts: Parts) -> Relu2Mlp:
        return Relu2Mlp(self, parts)


class Relu2Mlp:
    def __init__(self, spec: Relu2MlpSpec, parts: Parts) -> None:
        self._ops = parts.ops
        parts, hidden_size, size = parts.within(spec.name), spec.hidden_size, spec.intermediate_size
        self.up = parts.linear({"up_proj": size}, hidden_size, bias=spec.bias)
        self.down = parts.linear({"down_proj": hidden_size}, size, bias=spec.bias)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """down(relu(up(x))^2): x [T, H] -> [T, H]."""
        return self.down(ctx, self._ops.relu2(self.up(ctx, x)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu2MoeSpec:
    """Experts beside one that every token goes to. With `latent_size`, which is 0 for none, the former work on a
    projection of their inputs to so many entries, and the sum of their outputs is projected back."""

    name: str
    router: RouterSpec
    shared: Relu2MlpSpec
    hidden_size: int
    intermediate_size: int
    num_experts: int
    latent_size: int = 0
    latent_bias: bool = False

    def expert(self, number: int) -> Relu2MlpSpec:
        return Relu2MlpSpec(
            name=f"{self.name}.experts.{number}",
            hidden_size=self.latent_size or self.hidden_size,
            intermediate_size=self.intermediate_size,
        )

    def build(self, parts: Parts) -> Relu2Moe:
        return Relu2Moe(self, parts)


class Relu2Moe:
    def __init__(self, spec: Relu2MoeSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._router = spec.router.build(parts)
        self._latent = _latent(spec, parts.within(spec.name)) if spec.latent_size else None
        experts = [Relu2Mlp(spec.expert(i), parts) for i in range(spec.num_experts)]
        self._experts = parts.ops.pack_experts(
            [expert.up.weight for expert in experts], [expert.down.weight for expert in experts], ExpertActivation.RELU2
        )
        self._shared = spec.shared.build(parts)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says, plus the shared one."""
        ops = self._ops
        ids, weights = self._router(ctx, x)
        if self._latent is None:
            routed = ops.fused_experts(x, self._experts, ids, weights)
        else:
            into, out_of = self._latent
            routed = out_of(ctx, ops.fused_experts(into(ctx, x), self._experts, ids, weights))
        return ops.add_(routed, self._shared(ctx, x))


def _latent(spec: Relu2MoeSpec, parts: Parts) -> tuple[Linear, Linear]:
    """To the experts' inputs, and from their outputs."""
    bias, outside, inside = spec.latent_bias, spec.hidden_size, spec.latent_size
    into = parts.linear({"fc1_latent_proj": inside}, outside, bias=bias)
    return into, parts.linear({"fc2_latent_proj": outside}, inside, bias=bias)
