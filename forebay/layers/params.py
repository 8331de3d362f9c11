"""The declaration of weights: a layer says which checkpoint tensors it wants, in which shapes and joined how.

The declarations of a whole model are checked against the checkpoint before a byte of it is read, and then drive the
loading: nothing else names a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from forebay.ops import LinearWeight

Scales = tuple[tuple[int, float], ...]
"""(number of rows, factor) for all rows of a weight, in their order; () where every factor is 1."""

Rows = tuple[range, ...]
"""Rows of joined tensors in the order in which they are wanted; () for all of them as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParam:
    """Checkpoint tensors `names` joined along their first dimension, `sizes` long each; `inner` is the rest of it.

    `rows` of what is so joined make up the weight: so a step finds side by side what a family interleaves. `offset` is
    added to every entry when it is loaded: some families store norm weights as differences from 1. `scales` are runs of
    rows, all of them or none, and what each is multiplied by when it is loaded: so a constant multiplier of a layer's
    input or output costs nothing in a step. `min_bits` are the fewest in which it may be held, 4 or 8 bits for a
    matrix that is only multiplied with or looked up in, or 16 for the model's dtype.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inner: tuple[int, ...] = ()
    rows: Rows = ()
    offset: float = 0.0
    scales: Scales = ()
    min_bits: int = 16

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.rows)) if self.rows else sum(self.sizes), *self.inner)

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Before `rows` are taken."""
        return (sum(self.sizes), *self.inner)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def parts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each checkpoint tensor's name and shape."""
        for name, size in zip(self.names, self.sizes, strict=True):
            yield name, (size, *self.inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearParam:
    """Linear layers of the same input, run as one. `bias` None for none."""

    weight: TensorParam
    bias: TensorParam | None

    def tensors(self) -> tuple[TensorParam, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def vector(name: str, size: int, *, offset: float = 0.0) -> TensorParam:
    return TensorParam(names=(name,), sizes=(size,), offset=offset)


def tensor(name: str, *shape: int) -> TensorParam:
    return TensorParam(names=(name,), sizes=shape[:1], inner=shape[1:])


def linear(
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    *,
    bias: bool,
    rows: Rows = (),
    scales: Scales = (),
    input_scale: float = 1.0,
    min_bits: int = 4,
) -> LinearParam:
    """Layers `names` (`.weight` and `.bias` are added) of `sizes` outputs, one below the other, or `rows` of them.

    The input is multiplied by `input_scale`, and runs of outputs by `scales`.
    """
    weights, biases = tuple(f"{name}.weight" for name in names), tuple(f"{name}.bias" for name in names)
    scales = scales or ((sum(map(len, rows)) if rows else sum(sizes), 1.0),)
    weight = TensorParam(names=weights, sizes=tuple(sizes), inner=(in_features,), rows=rows)
    return LinearParam(
        weight=replace(weight, scales=_needed(scales, input_scale), min_bits=min_bits),
        bias=replace(weight, names=biases, inner=(), scales=_needed(scales)) if bias else None,
    )


def rows_of_blocks(*, count: int, block: int, first: int, size: int) -> Rows:
    """`size` rows of each of `count` blocks that are `block` rows apart; `first` is the first of the first block's."""
    return tuple(range(first + i * block, first + i * block + size) for i in range(count))


def _needed(scales: Scales, more: float = 1.0) -> Scales:
    scaled = tuple((rows, factor * more) for rows, factor in scales)
    return scaled if any(factor != 1.0 for _, factor in scaled) else ()


class Weights(Protocol):
    """Where a layer gets what it declared."""

    def tensor(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        """In the model's dtype, or in float32 for what its kernel wants so."""
        ...

    def linear(self, param: LinearParam) -> LinearWeight: ...
