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


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParam:
    """Checkpoint tensors `names` joined along their first dimension, `sizes` long each; `inner` is the rest of it.

    `offset` is added to every entry when it is loaded: some families store norm weights as differences from 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inner: tuple[int, ...] = ()
    offset: float = 0.0

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


def linear(names: Sequence[str], sizes: Sequence[int], in_features: int, *, bias: bool) -> LinearParam:
    """Layers `names` (`.weight` and `.bias` are added) with `sizes` outputs each, one below the other."""
    weights, biases = tuple(f"{name}.weight" for name in names), tuple(f"{name}.bias" for name in names)
    return LinearParam(
        weight=TensorParam(names=weights, sizes=tuple(sizes), inner=(in_features,)),
        bias=TensorParam(names=biases, sizes=tuple(sizes)) if bias else None,
    )


class Weights(Protocol):
    """Where a layer gets what it declared."""

    def tensor(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        """In the model's dtype, or in float32 for what its kernel wants so."""
        ...

    def linear(self, param: LinearParam) -> LinearWeight: ...
