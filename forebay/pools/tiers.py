"""Two tiers of KV (HiSparse, C23): all of it in the host tier, and on the device what prompts and decodes read.

A layer's column is one range of locations, so that attention reads from both tiers by location:

    0                      hot_base                    host_base
    |  resident pages       |  hot buffers, by row      |  host tier, by location of full KV
    0 .............................................................................................

A hot buffer has `num_columns` columns for selected tokens, and behind them a page for the newest: position p is in
column num_columns + p % page_size of these.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div
from forebay.ops.reference.attention import KvCache
from forebay.ops.reference.tiers import TieredKv, TierLayout
from forebay.pools.table import Column, Table

# Tokens: the host tier begins at a multiple, which is a page of memory whatever a token's bytes are, so that it can be
# a file.
_ALIGN: Final = max(4096, mmap.PAGESIZE)
_MOST_LOCATIONS: Final = 1 << 31  # int32

TakeTiers = Callable[[int, int], Tensor]
"""Bytes of the device, and of the host tier behind them: [bytes] uint8, zeros."""


class HotSizes(NamedTuple):
    """`num_rows` request rows, the padding row included, of `num_columns` columns each."""

    num_rows: int
    num_columns: int


class HotRows(Table):
    """The state of each request row's hot buffer: whether the row decodes from it, and the positions of its newest
    tokens. Each layer adds two columns, see `TieredKv`. P is the page size."""

    active = Column(torch.int32, pad=0)
    newest = Column(torch.int32, ("P",), pad=-1)


class Tiers:
    """The tiers of all layers with KV in the host tier. `take` returns the memory of a column."""

    def __init__(
        self,
        rows: HotRows,
        *,
        num_columns: int,
        page_size: int,
        num_pages: int,
        num_resident: int,
        take: TakeTiers,
    ) -> None:
        """`num_pages` and `num_resident` count padding pages, and `rows` the padding row."""
        self.rows, self._take = rows, take
        self._num_pages, self._num_resident, self._page_size = num_pages, num_resident, page_size
        hot_base = num_resident * page_size
        device_tokens = hot_base + rows.num_rows * (num_columns + page_size)
        self.layout = TierLayout(
            num_columns=num_columns,
            page_size=page_size,
            hot_base=hot_base,
            host_base=ceil_div(device_tokens, _ALIGN) * _ALIGN,
        )
        if (locations := self.layout.host_base + num_pages * page_size) > _MOST_LOCATIONS:
            why = f"KV in two tiers has {locations:,} locations, at most {_MOST_LOCATIONS:,}"
            raise ConfigError(f"{why}: lower --kv-cache-bytes, --max-total-tokens or device_buffer_size")
        self._columns: dict[str, Tensor] = {}  # by layer and name, by location
        self._layers: dict[int, TieredKv] = {}
        self.resident_bytes = 0

    def column(self, name: str, column: Column) -> Tensor:
        """Make a layer's column of full KV, `name` as in its table; return the host tier of it, by page."""
        shape = tuple(map(int, column.shape))[1:]
        token_bytes, layout = math.prod(shape) * column.dtype.itemsize, self.layout
        on_host = self._num_pages * self._page_size
        memory = self._take(layout.host_base * token_bytes, on_host * token_bytes)
        self.resident_bytes += layout.hot_base * token_bytes
        made = self._columns[name] = memory.view(column.dtype).view(-1, *shape)
        return made[layout.host_base :].view(self._num_pages, self._page_size, *shape)

    def keep(self, layer: int, make: Callable[[Mapping[str, Tensor]], KvCache]) -> None:
        """Let a layer whose columns were made have its KV."""
        prefix = f"{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in self._columns.items() if name.startswith(prefix)}
        rows = self.rows
        self._layers[layer] = TieredKv(make(own), rows[f"{layer}.positions"], rows[f"{layer}.last_used"])

    def of(self, layer: int) -> TieredKv | None:
        """Return the tiers of a layer; None for a layer with all of its KV on the device."""
        return self._layers.get(layer)

    @property
    def resident(self) -> dict[str, Tensor]:
        """The resident pages of each column by name, [num_resident, page_size, ...]."""
        of_pages = {name: column[: self.layout.hot_base] for name, column in self._columns.items()}
        return {
            name: tokens.view(self._num_resident, self._page_size, *tokens.shape[1:])
            for name, tokens in of_pages.items()
        }

    def reset_padding(self) -> None:
        """Reset the padding row and the padding page after steps that wrote there."""
        self.rows.reset_padding()
        for column in self._columns.values():
            column[: self._page_size].zero_()
            column[self.layout.hot_base :][: self.layout.num_columns + self._page_size].zero_()


def hot_columns(layers: list[int]) -> dict[str, Column]:
    """Return the columns of `HotRows` for these layers; S is the number of a hot buffer's columns."""
    columns = dict(HotRows.declared)
    for layer in layers:
        columns[f"{layer}.positions"] = Column(torch.int32, ("S",), pad=-1)
        columns[f"{layer}.last_used"] = Column(torch.int32, ("S",), pad=0)
    return columns
