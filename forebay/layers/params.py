"""Declarations of weights: checkpoint tensors, their shapes, and how they are joined.

Layers name their weights in their constructors and nowhere else. A dry build of a model collects the weights that it
asks for, and they are checked against the checkpoint before a byte of that is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forebay.ops import LinearWeight
from forebay.ops.reference.tables import RowTable

Scales = tuple[tuple[int, float], ...]
"""(number of rows, factor) for all rows of a weight, in their order; () where every factor is 1."""

Change = Callable[[Tensor], Tensor]
"""What is computed of a weight once it is there; nothing is where there are only shapes."""

Rows = tuple[range, ...]
"""Rows of joined tensors in the order in which they are wanted; () for all of them as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParam:
    """Checkpoint tensors `names` joined along their first dimension, `sizes` long each; `inner` is the rest of it.

    `rows` of the joined tensor make up the weight: so a step finds side by side the rows that a family interleaves.
    `own` are those of them, in their order, that a rank has; () for all. `offset` is added to every entry when it is
    loaded: some families store norm weights as differences from 1. `scales` are runs of rows, all of them or none,
    and the factor of each when it is loaded: so a constant multiplier of a layer's input or output costs nothing in a
    step. `min_bits` are the fewest bits that may hold it: 4, 8 or `ENCODER_BITS` for a matrix that is only multiplied
    with or looked up in, 16 for the model's dtype. A `bound` is one number that values are held within, perhaps an
    infinity. `bare`: files have the one number without a dimension. `by_row`: it stays in its file, from which single
    rows are read.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inner: tuple[int, ...] = ()
    rows: Rows = ()
    own: Rows = ()
    offset: float = 0.0
    scales: Scales = ()
    min_bits: int = 16
    bound: bool = False
    bare: bool = False
    by_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight, of this rank's part if there are ranks."""
        kept = self.own or self.rows
        return (sum(map(len, kept)) if kept else sum(self.sizes), *self.inner)

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Before `rows` are taken."""
        return (sum(self.sizes), *self.inner)

    @property
    def own_entries(self) -> Rows:
        """Return runs of entries of the joined tensor, flat, that have all that are the rank's; () for all."""
        if not self.own or self.rows:
            return ()
        size = math.prod(self.inner)
        return tuple(range(rows.start * size, rows.stop * size) for rows in self.own)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def parts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each checkpoint tensor's name and shape."""
        for name, size in zip(self.names, self.sizes, strict=True):
            yield name, () if self.bare else (size, *self.inner)


def vector(name: str, size: int, *, offset: float = 0.0) -> TensorParam:
    """Declare a tensor [size]; `offset` is added to its values."""
    return TensorParam(names=(name,), sizes=(size,), offset=offset)


def in_order(tensor: Tensor, rows: Rows) -> Tensor:
    """Return the tensor with the entries of its last dimension in the order of `rows`."""
    if not rows:
        return tensor
    return tensor.index_select(-1, torch.tensor([at for part in rows for at in part], device=tensor.device))


def rows_of_blocks(*, count: int, block: int, first: int, size: int) -> Rows:
    """`size` rows of each of `count` blocks that are `block` rows apart; `first` is the first of the first block's."""
    return tuple(range(first + i * block, first + i * block + size) for i in range(count))


def rows_of_heads(*blocks: tuple[int, range, int]) -> list[range]:
    """Return the rows of the heads that a rank has. Blocks are one below the other: how many heads a block has, which
    of them are the rank's, and the rows of a head."""
    own, first = [], 0
    for count, heads, size in blocks:
        own.append(range(first + heads.start * size, first + heads.stop * size))
        first += count * size
    return own


def unchanged(values: Tensor) -> Tensor:
    """Return the values as they are: the default `Change`."""
    return values


class Weights(Protocol):
    """Where a model gets its weights, each of which it asks for once."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def device(self) -> torch.device | str: ...

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of all weights by the form that holds them: `bfloat16`, `8 bits`, `4 bits`."""
        ...

    @property
    def numbers(self) -> Sequence[float]:
        """Numbers that `number` has returned so far."""
        ...

    def tensor(self, param: TensorParam, *, float32: bool = False, change: Change = unchanged) -> Tensor:
        """In the model's dtype, or in float32 for what its kernel wants so, and as `change` makes it."""
        ...

    def values(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        """As `tensor`, for a caller that packs the values and does not keep them."""
        ...

    def number(self, param: TensorParam) -> float:
        """Load a tensor of one element as a float."""

    def linear(self, weight: TensorParam, bias: TensorParam | None) -> LinearWeight:
        """Load a linear layer in the kernels' packed format."""

    def row_table(self, param: TensorParam) -> RowTable:
        """Return where the rows of a table are that stays in its file. Raises ModelError if rows cannot be read so."""
        ...

    def table(self, param: TensorParam) -> Tensor | LinearWeight:
        """To look rows up in, and perhaps to multiply with as well: packed if it is held in codes."""
        ...
