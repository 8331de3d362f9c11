"""Named tensors that share their first dimension; row 0 is the padding row. The only padding code (C13, C14)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Self, overload

import torch
from torch import Tensor

from forebay.memory.slots import PAD
from forebay.pools.regions import Take

NOTHING_MADE: Final[Mapping[str, Tensor]] = {}


class Column:
    """One quantity per row, `[rows, *shape]`, whose padding rows hold `pad`; a class attribute of a `Table`, or given
    to one when it is made.

    A letter in `shape`, or as the pad, stands for a size that is given when the table is made; one as the pad also when
    it is filled. No pad is taken for granted: what a padded row of a new quantity may safely hold is the question that
    was once forgotten.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int | str, ...] = (), *, pad: float | str) -> None:
        self.dtype, self.shape, self.pad = dtype, shape, pad
        self.name = ""

    def __set_name__(self, owner: type[Table], name: str) -> None:
        self.name = name
        owner.declared = {**owner.declared, name: self}

    @overload
    def __get__(self, table: None, owner: type[Table]) -> Self: ...
    @overload
    def __get__(self, table: Table, owner: type[Table]) -> Tensor: ...
    def __get__(self, table: Table | None, owner: type[Table]) -> Self | Tensor:
        return self if table is None else table._tensors[self.name]


class Table:
    """Columns of `num_rows` rows, all holding their pads at first. `columns` None: those that the class declares.
    They lie in what `take` gives; None: in torch's own memory. Columns that were `made` hold their pads already."""

    declared: ClassVar[Mapping[str, Column]] = {}

    def __init__(
        self,
        num_rows: int,
        *,
        columns: Mapping[str, Column] | None = None,
        device: torch.device | str = "cpu",
        sizes: Mapping[str, int] | None = None,
        take: Take | None = None,
        made: Mapping[str, Tensor] = NOTHING_MADE,
    ) -> None:
        self.num_rows, self.take = num_rows, take
        self.columns = self.declared if columns is None else columns
        self._pads = self._pads_of(sizes or {})
        self._tensors: dict[str, Tensor] = {}
        for name, column in self.columns.items():
            shape, pad = (num_rows, *_shape(column, sizes or {})), self._pads[name]
            if name in made:
                assert made[name].shape == shape, f"column {name} was made as {tuple(made[name].shape)}, not {shape}"
                tensor = made[name]
            elif take is None:
                tensor = torch.full(shape, pad, dtype=column.dtype, device=device)
            else:
                tensor = take(math.prod(shape) * column.dtype.itemsize).view(column.dtype).view(shape)
                if pad != 0:  # zeros are there, and not written they take no memory
                    tensor.fill_(pad)
            self._tensors[name] = tensor

    def _pads_of(self, sizes: Mapping[str, int]) -> dict[str, float]:
        return {name: _size(column.pad, sizes) for name, column in self.columns.items()}

    @property
    def tensors(self) -> Iterable[Tensor]:
        return self._tensors.values()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def replace(self, name: str, tensor: Tensor) -> None:
        """Let a column, as it is, lie where the caller says."""
        self._tensors[name] = tensor

    def head(self, n: int) -> Self:
        """A view of the first n rows."""
        view = object.__new__(type(self))
        view.num_rows, view.take, view.columns, view._pads = n, self.take, self.columns, self._pads
        view._tensors = {name: tensor[:n] for name, tensor in self._tensors.items()}
        return view

    def fill(self, values: Mapping[str, Tensor], n: int, padded: int, **sizes: int) -> None:
        """Rows [0, n) become `values`, rows [n, padded) pads; a column without values is padded whole. `sizes` are for
        pads that differ from step to step. KeyError for a value that no column takes, ValueError for values that are
        not n.
        """
        unknown = values.keys() - self.columns.keys()
        if unknown:
            raise KeyError(f"{type(self).__name__} has no columns {sorted(unknown)}; it has {sorted(self.columns)}")
        for name, value in values.items():
            if len(value) != n:
                raise ValueError(f"{type(self).__name__}.{name} was given {len(value)} values for {n} rows")
        pads = self._pads_of(sizes) if sizes else self._pads
        for name, tensor in self._tensors.items():
            live = n if name in values else 0
            if live:
                tensor[:n].copy_(values[name], non_blocking=True)
            if live < padded:
                tensor[live:padded].fill_(pads[name])

    def reset_rows(self, rows: Tensor) -> None:
        for name, tensor in self._tensors.items():
            tensor.index_fill_(0, rows, self._pads[name])

    def reset_padding(self, *names: str) -> None:
        """A step that changes the rows it was given changes the padding row too: put its pads back, in the columns
        named or in all."""
        for name in names or self._tensors:
            self._tensors[name][PAD].fill_(self._pads[name])

    def reset(self) -> None:
        """Set all rows to their pads; their memory must contain zeros already."""
        for name, tensor in self._tensors.items():
            if self._pads[name] != 0:
                tensor.fill_(self._pads[name])


def _shape(column: Column, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(_size(size, sizes)) for size in column.shape)


def _size(size: float | str, sizes: Mapping[str, int]) -> float:
    return sizes[size] if isinstance(size, str) else size
