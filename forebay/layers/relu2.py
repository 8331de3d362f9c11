"""Feed-forward layers without a gate, whose activation is the square of a ReLU (Nemotron-H): one for all tokens, or a
mixture of experts beside a shared one.

Primer, arXiv 2109.08668, section 4.1. Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, TensorParam, linear
from forebay.layers.routing import RouterSpec
from forebay.ops import ExpertActivation
from forebay.pools.cache_spec import CacheSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu2MlpSpec:
    name: str
    hidden_size: int
    intermediate_size: int
    bias: bool = False

    @property
    def up(self) -> LinearParam:
        return linear([f"{self.name}.up_proj"], [self.intermediate_size], self.hidden_size, bias=self.bias)

    @property
    def down(self) -> LinearParam:
        return linear([f"{self.name}.down_proj"], [self.hidden_size], self.intermediate_size, bias=self.bias)

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.up.tensors(), *self.down.tensors())

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return ()

    def build(self, parts: Parts) -> Relu2Mlp:
        return Relu2Mlp(self, parts)


class Relu2Mlp:
    def __init__(self, spec: Relu2MlpSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._up = parts.linear(spec.up)
        self._down = parts.linear(spec.down)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """down(relu(up(x))^2): x [T, H] -> [T, H]."""
        return self._down(ctx, self._ops.relu2(self._up(ctx, x)))


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

    @property
    def experts(self) -> tuple[Relu2MlpSpec, ...]:
        return tuple(
            Relu2MlpSpec(
                name=f"{self.name}.experts.{i}",
                hidden_size=self.latent_size or self.hidden_size,
                intermediate_size=self.intermediate_size,
            )
            for i in range(self.num_experts)
        )

    @property
    def latent(self) -> tuple[LinearParam, ...]:
        """To the experts' inputs, and from their outputs."""
        if not self.latent_size:
            return ()
        bias, outside, inside = self.latent_bias, self.hidden_size, self.latent_size
        return (
            linear([f"{self.name}.fc1_latent_proj"], [inside], outside, bias=bias),
            linear([f"{self.name}.fc2_latent_proj"], [outside], inside, bias=bias),
        )

    def params(self) -> tuple[TensorParam, ...]:
        latent = (tensor for layer in self.latent for tensor in layer.tensors())
        experts = (param for expert in self.experts for param in expert.params())
        return (*self.router.params(), *latent, *experts, *self.shared.params())

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return ()

    def build(self, parts: Parts) -> Relu2Moe:
        return Relu2Moe(self, parts)


class Relu2Moe:
    def __init__(self, spec: Relu2MoeSpec, parts: Parts) -> None:
        weights = parts.weights
        self._ops = parts.ops
        self._router = spec.router.build(parts)
        self._shared = spec.shared.build(parts)
        self._latent = tuple(parts.linear(layer) for layer in spec.latent)
        packed = [(weights.linear(expert.up), weights.linear(expert.down)) for expert in spec.experts]
        self._experts = parts.ops.pack_experts(
            [up for up, _ in packed], [down for _, down in packed], ExpertActivation.RELU2
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says, plus the shared one."""
        ops = self._ops
        ids, weights = self._router(ctx, x)
        if not self._latent:
            routed = ops.fused_experts(x, self._experts, ids, weights)
        else:
            into, out_of = self._latent
            routed = out_of(ctx, ops.fused_experts(into(ctx, x), self._experts, ids, weights))
        return ops.add_(routed, self._shared(ctx, x))
