"""The linear layers of a model, one or several of the same input run as one.

Shape letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.ops import LinearWeight, Ops
from forebay.ops.exchange import Exchange
from forebay.ops.reference.adapters import AdapterTable


class Linear:
    """The only call of `Ops.linear`, and of what adapters add to it. `adapters` None: the layer can have none."""

    __slots__ = ("_adapters", "_ops", "weight")

    def __init__(self, ops: Ops, weight: LinearWeight, adapters: AdapterTable | None = None) -> None:
        self._ops = ops
        self.weight = weight
        self._adapters = adapters

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        out = self.of(x)
        if self._adapters is not None and ctx.adapters is not None:
            self._ops.adapters.add(out, x, ctx.adapters, self._adapters)
        return out

    def of(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], outside of a decoder's step, without adapters."""
        return self._ops.linear.apply(x, self.weight)

    def of_f32(self, x: Tensor) -> Tensor:
        """As `of`; the sums are not rounded: [T, N] float32."""
        return self._ops.linear.apply_f32(x, self.weight)


class GatheredLinear:
    """A linear layer of which each rank has a part of the outputs: all ranks get all of them."""

    __slots__ = ("_exchange", "_layer")

    def __init__(self, layer: Linear, exchange: Exchange) -> None:
        self._layer, self._exchange = layer, exchange

    @property
    def weight(self) -> LinearWeight:
        """Return the part of this rank."""
        return self._layer.weight

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self._exchange.gather(self._layer(ctx, x))
