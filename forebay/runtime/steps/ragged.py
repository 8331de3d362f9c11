"""Inputs of steps whose sequences have tokens of any number, as tables that are filled together.

Shape letters: T tokens, S sequences, both padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

import torch
from torch import Tensor

from forebay.pools.table import Column, Table
from forebay.runtime.host.plan_columns import padded

# Of sequences; `q_ends` is the token after each one's last, T of a padded one: so the first of those has all padded
# tokens, the others have none.
RAGGED: Final[Mapping[str, Column]] = {**padded("S"), "q_ends": Column(torch.int32, pad="T")}


class RaggedInputs:
    """`num_rows` are the tokens. There is room for one sequence more than may run, so that a padded token always has
    one to belong to; `others` are as long as the tokens."""

    def __init__(self, tokens: Table, sequences: Table, *others: Table) -> None:
        self._tokens, self._sequences, self._others = tokens, sequences, others

    @property
    def num_rows(self) -> int:
        return self._tokens.num_rows

    def fill(self, values: Mapping[str, Tensor], n: int, padded: int) -> None:
        """Columns of tokens have n values, those of sequences and of others the number of live entries."""
        for table in (self._sequences, *self._others):
            own = {name: value for name, value in values.items() if name in table.columns}
            rows = table.num_rows if table is self._sequences else padded
            table.fill(own, len(next(iter(own.values()), ())), rows, T=padded)
        self._tokens.fill({name: value for name, value in values.items() if name in self._tokens.columns}, n, padded)

    def __getitem__(self, name: str) -> Tensor:
        return next(table for table in (self._tokens, self._sequences, *self._others) if name in table.columns)[name]

    def head(self, n: int) -> Self:
        return type(self)(self._tokens.head(n), self._sequences, *(table.head(n) for table in self._others))


def from_zero(table: Table, ends: str) -> Tensor:
    """Return [S + 1], 0 and then the column `ends`, which is a view of it from now on."""
    bounds = torch.cat([table[ends].new_zeros(1), table[ends]])
    table.replace(ends, bounds[1:])
    return bounds
