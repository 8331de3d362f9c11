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
from forebay.layers.routing import RouterSpec

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

    def build(self, parts: Parts) -> Mlp:
        return Mlp(self, parts)


class Mlp:
    def __init__(self, spec: MlpSpec, parts: Parts) -> None:
        parts, ops = parts.within(spec.name), parts.ops
        self._activate = ops.silu_and_mul if spec.activation is Activation.SILU else ops.gelu_and_mul
        (*gate_up, down), size, hidden_size = spec.names, spec.intermediate_size, spec.hidden_size
        self.gate_up = parts.linear(
            dict.fromkeys(gate_up, 2 * size // len(gate_up)),
            hidden_size,
            bias=spec.bias,
            scales=((size, spec.gate_scale), (size, 1.0)),
        )
        self.down = parts.linear({down: hidden_size}, size, bias=spec.bias, scales=((hidden_size, spec.scale),))

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)): x [T, H] -> [T, H]."""
        return self.down(ctx, self._activate(self.gate_up(ctx, x)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """`names`: what the checkpoint calls gate, up and down of an expert."""

    name: str
    router: RouterSpec
    hidden_size: int
    intermediate_size: int
    num_experts: int
    names: tuple[str, str, str] = GATE_UP_DOWN

    def expert(self, number: int) -> MlpSpec:
        return MlpSpec(
            name=f"{self.name}.experts.{number}",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            names=self.names,
        )

    def build(self, parts: Parts) -> Moe:
        return Moe(self, parts)


class Moe:
    def __init__(self, spec: MoeSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._router = spec.router.build(parts)
        experts = [Mlp(spec.expert(i), parts) for i in range(spec.num_experts)]
        self._experts = parts.ops.pack_experts(
            [expert.gate_up.weight for expert in experts], [expert.down.weight for expert in experts]
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says."""
        return self._ops.fused_experts(x, self._experts, *self._router(ctx, x))
