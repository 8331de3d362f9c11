"""Gated feed-forward layers: one for all tokens, or a mixture of experts.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, TensorParam, linear
from forebay.layers.routing import RouterSpec
from forebay.pools.cache_spec import CacheSpec

GATE_UP_DOWN: Final = ("gate_proj", "up_proj", "down_proj")


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """`names`: what the checkpoint calls gate, up and down, or gate with up and down. The gate and the layer's output
    are multiplied by `gate_scale` and `scale`."""

    name: str
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    names: tuple[str, ...] = GATE_UP_DOWN
    gate_scale: float = 1.0
    scale: float = 1.0

    @property
    def gate_up(self) -> LinearParam:
        names, size = [f"{self.name}.{part}" for part in self.names[:-1]], self.intermediate_size
        scales = ((size, self.gate_scale), (size, 1.0))
        return linear(names, [2 * size // len(names)] * len(names), self.hidden_size, bias=self.bias, scales=scales)

    @property
    def down(self) -> LinearParam:
        names, size = [f"{self.name}.{self.names[-1]}"], self.hidden_size
        return linear(names, [size], self.intermediate_size, bias=self.bias, scales=((size, self.scale),))

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.gate_up.tensors(), *self.down.tensors())

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return ()

    def build(self, parts: Parts) -> Mlp:
        return Mlp(self, parts)


class Mlp:
    def __init__(self, spec: MlpSpec, parts: Parts) -> None:
        ops = parts.ops
        self._activate = ops.silu_and_mul if spec.activation is Activation.SILU else ops.gelu_and_mul
        self._gate_up = parts.linear(spec.gate_up)
        self._down = parts.linear(spec.down)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)): x [T, H] -> [T, H]."""
        return self._down(ctx, self._activate(self._gate_up(ctx, x)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """`names`: what the checkpoint calls gate, up and down of an expert."""

    name: str
    router: RouterSpec
    hidden_size: int
    intermediate_size: int
    num_experts: int
    names: tuple[str, str, str] = GATE_UP_DOWN

    @property
    def experts(self) -> tuple[MlpSpec, ...]:
        return tuple(
            MlpSpec(
                name=f"{self.name}.experts.{i}",
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                names=self.names,
            )
            for i in range(self.num_experts)
        )

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.router.params(), *(param for expert in self.experts for param in expert.params()))

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return ()

    def build(self, parts: Parts) -> Moe:
        return Moe(self, parts)


class Moe:
    def __init__(self, spec: MoeSpec, parts: Parts) -> None:
        weights = parts.weights
        self._ops = parts.ops
        self._router = spec.router.build(parts)
        packed = [(weights.linear(expert.gate_up), weights.linear(expert.down)) for expert in spec.experts]
        self._experts = parts.ops.pack_experts([gate_up for gate_up, _ in packed], [down for _, down in packed])

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says."""
        return self._ops.fused_experts(x, self._experts, *self._router(ctx, x))
