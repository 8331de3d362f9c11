"""A part whose output is multiplied, for each token, by one gate: the shared expert of Qwen's mixtures.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import Parts, PartSpec
from forebay.layers.context import ForwardContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarGateSpec:
    """part(x) * sigmoid(gate(x)); `gate` is the checkpoint's name of a linear layer with one output."""

    gate: str
    part: PartSpec
    hidden_size: int
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> ScalarGate:
        return ScalarGate(self, parts)


class ScalarGate:
    """A part times sigmoid of one gate value per token."""

    def __init__(self, spec: ScalarGateSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._gate = parts.linear({spec.gate: 1}, spec.hidden_size, min_bits=16)
        self._part = spec.part.build(parts)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._ops.elementwise.mul_sigmoid(self._part(ctx, x), self._gate(ctx, x))
