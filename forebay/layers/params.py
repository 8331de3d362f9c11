"""The declaration of weights: a layer says which checkpoint tensors it wants, in which shapes and joined how.

The declarations of a whole model are checked against the checkpoint before a byte of it is read, and then drive the
loading: nothing else names a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forebay.ops import LinearWeight

Scales = tuple[tuple[int, float], ...]
"""(number of rows, factor) for all rows of a weight, in their order; () where every factor is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParam:
    """Checkpoint tensors `names` joined along their first dimension, `sizes` long each; `inner` is the rest of it.

    `offset` is added to every entry when it is loaded: some families store norm weights as differences from 1.
    `scales` are runs of rows, all of them or none, and what each is multiplied by when it is loaded: so a constant
    multiplier of a layer's input or output costs nothing in a step.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inner: tuple[int, ...] = ()
    offset: float = 0.0
    scales: Scales = ()

    @property
    def shape(self) -> tuple[int, ...]:
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
    scales: Scales = (),
    input_scale: float = 1.0,
) -> LinearParam:
    """Layers `names` (`.weight` and `.bias` are added) with `sizes` outputs each, one below the other.

    The input is multiplied by `input_scale`, and runs of outputs by `scales`.
    """
    weights, biases = tuple(f"{name}.weight" for name in names), tuple(f"{name}.bias" for name in names)
    scales = scales or ((sum(sizes), 1.0),)
    return LinearParam(
        weight=TensorParam(
            names=weights, sizes=tuple(sizes), inner=(in_features,), scales=_needed(scales, input_scale)
        ),
        bias=TensorParam(names=biases, sizes=tuple(sizes), scales=_needed(scales)) if bias else None,
    )


def _needed(scales: Scales, more: float = 1.0) -> Scales:
    scaled = tuple((rows, factor * more) for rows, factor in scales)
    return scaled if any(factor != 1.0 for _, factor in scaled) else ()


class Weights(Protocol):
    """Where a layer gets what it declared."""

    def tensor(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        """In the model's dtype, or in float32 for what its kernel wants so."""
        ...

    def linear(self, param: LinearParam) -> LinearWeight: ...
