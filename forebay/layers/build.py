"""From the description of layers to layers: what every part is built with, and what it has to offer.

A spec is a frozen value that says which weights a part wants and what it keeps of the tokens it has seen; `build` makes
the part. A model is described, checked and sized before a weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.params import LinearParam, TensorParam, Weights
from forebay.layers.rotary import RopeSpec, RopeTables
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec


class Parts:
    """What a model's layers are built with, handed from one to the next."""

    def __init__(self, ops: Ops, weights: Weights, ropes: RopeTables) -> None:
        self.ops, self.weights = ops, weights
        self._ropes = ropes
        self.kept: list[CacheSpec] = []

    def linear(self, param: LinearParam) -> Linear:
        return Linear(self.ops, self.weights.linear(param))

    def rope(self, spec: RopeSpec) -> Tensor:
        return self._ropes.table(spec)

    def keep(self, spec: CacheSpec) -> int:
        """Declare what a mixer keeps; its number in the `CachePool`."""
        self.kept.append(spec)
        return len(self.kept) - 1


class Part(Protocol):
    """Mixes tokens (attention, a recurrence, or both), or transforms each by itself. x [T, H] -> [T, H], which the
    caller may change."""

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor: ...


class PartSpec(Protocol):
    def params(self) -> tuple[TensorParam, ...]: ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What it keeps, in the order in which `build` declares it; nothing for a feed-forward layer."""
        ...

    def build(self, parts: Parts) -> Part: ...


class Block(Protocol):
    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        """Add x, what the layer before returned, to the residual stream in place; return what the next one has to add.

        Both are [T, H]. Each addition can so share a pass with the norm that follows it.
        """
        ...


class BlockSpec(Protocol):
    """One decoder layer."""

    def params(self) -> Sequence[TensorParam]: ...

    def cache_specs(self) -> tuple[CacheSpec, ...]: ...

    def build(self, parts: Parts) -> Block: ...
