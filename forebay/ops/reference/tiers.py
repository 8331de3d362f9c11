"""Reading selected tokens from two tiers of KV (HiSparse): the ops of every backend, and their definition in torch.

Shape letters: T tokens, S sequences, R request rows, N tokens that are selected at most, C columns of a hot buffer,
P page size, L locations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.selection import token_sequences


class TierLayout(NamedTuple):
    """The ranges of locations of a layer's columns, see `pools/tiers.py`: hot buffers begin at `hot_base`, the host
    tier at `host_base`."""

    num_columns: int
    page_size: int
    hot_base: int
    host_base: int

    @property
    def row_tokens(self) -> int:
        return self.num_columns + self.page_size


class TieredKv(NamedTuple):
    """A layer's KV in two tiers, and what its hot buffers hold: the position in each column, -1 for none, and the
    number of tokens that the row had when the column was last used."""

    kv: KvCache  # by location, of all tiers
    positions: Tensor  # [R + 1, C] int32
    last_used: Tensor  # [R + 1, C] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStep:
    """A step's input for all layers with two tiers.

    A page has its resident copy in page page_map[p], 0 for none. Rows that are `active` read from their hot buffers;
    their `newest` tokens are the positions in the page behind its columns. The step's own tokens go to locations
    `device_loc` and, in the host tier, `host_loc`. `counts` [2] int64 grow by the tokens that were selected and by
    those that were loaded from the host tier.
    """

    layout: TierLayout
    page_map: Tensor  # [pages + 1] int32
    active: Tensor  # [R + 1] int32
    newest: Tensor  # [R + 1, P] int32
    device_loc: Tensor  # [T] int64
    host_loc: Tensor  # [T] int64
    counts: Tensor  # [2] int64


class TierOps:
    """Where a step's tokens go, and from where attention reads the selected ones, defined in torch."""

    def bind_newest(
        self,
        out_cache_loc: Tensor,
        positions: Tensor,
        rows: Tensor,
        q_start: Tensor,
        page_map: Tensor,
        active: Tensor,
        newest: Tensor,
        layout: TierLayout,
    ) -> tuple[Tensor, Tensor]:
        """Return the device and host locations of the step's tokens, [T] int64 each. A token of an active row goes to
        the page of newest tokens of the row's hot buffer, which then has its position; another token to the resident
        copy of its page, or to the padding page.

        out_cache_loc and positions [T] int64, of sequences in rows [S] int32 that begin at q_start [S + 1] int32.
        """
        seqs = rows.repeat_interleave(q_start[1:] - q_start[:-1], output_size=len(positions)).long()
        pages, at = out_cache_loc // layout.page_size, out_cache_loc % layout.page_size
        hot = active[seqs] != 0
        newest.index_put_((seqs, at), torch.where(hot, positions.int(), newest[seqs, at]))
        in_row = layout.hot_base + seqs * layout.row_tokens + layout.num_columns + at
        resident = page_map[pages].long() * layout.page_size + at
        return torch.where(hot, in_row, resident), out_cache_loc + layout.host_base

    def swap_in(self, positions: Tensor, counts: Tensor, paged: PagedKv, tiers: TieredKv, step: TierStep) -> PagedKv:
        """Return each token as a sequence of its own, over the locations of the selected positions, as
        `SelectionOps.token_pages` does; -1 behind them.

        positions [T, N] int32, counts [T] int32, as `select_tokens` returns them. A position of an active row is read
        from the row's hot buffer. A position that is not there is loaded first, once for all queries that selected it.
        It replaces the column that was used longest ago, of equal ones the first. A column that this step uses is not
        replaced: if no other is left, the position is read from the host tier. The positions of other rows are read
        from the resident copy of their page, without one from the host tier.
        """
        locations = torch.full(positions.shape, -1, dtype=torch.int32)
        starts, lens = paged.q_start.tolist(), paged.seq_lens.tolist()
        for i, row in enumerate(paged.rows.tolist()):
            tokens = range(starts[i], starts[i + 1])
            if not tokens:
                continue
            hot = _HotRow(row, lens[i] - len(tokens), tiers, step) if int(step.active[row]) else None
            chosen = {token: positions[token, : int(counts[token])].tolist() for token in tokens}
            if hot is not None:
                hot.touch({position for own in chosen.values() for position in own})
            for token, own in chosen.items():
                for j, position in enumerate(own):
                    locations[token, j] = _location(position, paged, row, hot, step)
            if hot is not None:
                step.counts[0] += sum(map(len, chosen.values()))
                step.counts[1] += hot.num_loaded
        numbers = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return token_sequences(locations, numbers[:-1], numbers, counts, paged)


def _location(position: int, paged: PagedKv, row: int, hot: _HotRow | None, step: TierStep) -> int:
    """Return the location from which a position of a row is read; `hot` is the hot buffer of an active row."""
    page, inside = int(paged.page_table[row, position // paged.page_size]), position % paged.page_size
    on_host = step.layout.host_base + page * paged.page_size + inside
    if hot is not None:
        return hot.location(position, on_host)
    copy = int(step.page_map[page])
    return copy * paged.page_size + inside if copy else on_host


class _HotRow:
    """The hot buffer of a row in one layer and step; `now` tokens were there before the step."""

    def __init__(self, row: int, now: int, tiers: TieredKv, step: TierStep) -> None:
        self._layout, self._now, self._kv = step.layout, now, tiers.kv
        self._base = step.layout.hot_base + row * step.layout.row_tokens
        self._positions, self._last_used = tiers.positions[row], tiers.last_used[row]
        self._newest = step.newest[row]
        self._column_of = {position: column for column, position in enumerate(self._positions.tolist())}
        self.num_loaded = 0

    def touch(self, wanted: set[int]) -> None:
        """Use the columns that hold a wanted position."""
        for position in wanted:
            if (column := self._column_of.get(position)) is not None and not self._is_newest(position):
                self._last_used[column] = self._now

    def location(self, position: int, on_host: int) -> int:
        if self._is_newest(position):
            return self._base + self._layout.num_columns + position % self._layout.page_size
        column = self._column_of.get(position)
        if column is None:
            column = int(self._last_used.argmin())
            if int(self._last_used[column]) >= self._now:
                self.num_loaded += 1
                return on_host
            self._load(position, column, on_host)
        return self._base + column

    def _is_newest(self, position: int) -> bool:
        return int(self._newest[position % self._layout.page_size]) == position

    def _load(self, position: int, column: int, on_host: int) -> None:
        for tensor in (self._kv.k, self._kv.k_scale):
            if tensor is not None:
                tensor[self._base + column] = tensor[on_host]
        if self._kv.v.data_ptr() != self._kv.k.data_ptr():
            for tensor in (self._kv.v, self._kv.v_scale):
                if tensor is not None:
                    tensor[self._base + column] = tensor[on_host]
        self._column_of.pop(int(self._positions[column]), None)
        self._column_of[position] = column
        self._positions[column], self._last_used[column] = position, self._now
        self.num_loaded += 1
