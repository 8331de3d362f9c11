"""Gated experts that the checkpoint has in one tensor for all of them (Granite).

Shape letters: T tokens, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import TensorParam, tensor
from forebay.layers.routing import RouterSpec
from forebay.pools.cache_spec import CacheSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedMoeSpec:
    name: str
    router: RouterSpec
    hidden_size: int
    intermediate_size: int
    num_experts: int

    @property
    def gate_up(self) -> TensorParam:
        """[E, 2I, H], of each expert the gate's rows first."""
        return tensor(
            f"{self.name}.input_linear.weight", self.num_experts, 2 * self.intermediate_size, self.hidden_size
        )

    @property
    def down(self) -> TensorParam:
        """[E, H, I]."""
        return tensor(f"{self.name}.output_linear.weight", self.num_experts, self.hidden_size, self.intermediate_size)

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.router.params(), self.gate_up, self.down)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return ()

    def build(self, parts: Parts) -> StackedMoe:
        return StackedMoe(self, parts)


class StackedMoe:
    def __init__(self, spec: StackedMoeSpec, parts: Parts) -> None:
        ops, weights = parts.ops, parts.weights
        self._ops = ops
        self._router = spec.router.build(parts)
        self._gate_up = [ops.pack_linear(expert) for expert in weights.tensor(spec.gate_up)]
        self._down = [ops.pack_linear(expert) for expert in weights.tensor(spec.down)]

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says."""
        ids, weights = self._router(x)
        return self._ops.fused_experts(x, self._gate_up, self._down, ids, weights)
