"""The linear layers of a model, one or several of the same input run as one.

Shape letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.ops import LinearWeight, Ops


class Linear:
    """The only call of `Ops.linear`: what a step adds to a layer (an adapter), or a layer does for its share of a model
    alone (its slice of the outputs), has its place here."""

    __slots__ = ("_ops", "weight")

    def __init__(self, ops: Ops, weight: LinearWeight) -> None:
        self._ops = ops
        self.weight = weight

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self._ops.linear(x, self.weight)
