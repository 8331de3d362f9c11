"""What a layer may know about the step it runs in. No ambient state: this is an argument.

Shape letters: T tokens, S sequences, R request rows, P pages per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.ops.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKv:
    """Where a kind of attention finds and puts its KV: sequence i's pages are page_table[rows[i]], or, with a
    `page_map`, page_map[page_table[rows[i]]]."""

    page_table: Tensor  # [R + 1, P] int32, one entry per page
    rows: Tensor  # [S] int32
    out_cache_loc: Tensor  # [T] int64: page * page_size + offset
    page_map: Tensor | None = None  # [pages + 1] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Sequence i's tokens are q_start[i]..q_start[i+1]; after the step it has seq_lens[i] tokens of KV.

    Positions are contiguous and end at seq_lens[i] - 1; attention is causal over the row's pages. `full` is for layers
    that keep all tokens; `window`, whose pages behind the window are not there any more, for those with a sliding
    window, and the same as `full` where no layer has one. `states` names the recurrent states.
    """

    positions: Tensor  # [T] int64
    q_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    page_size: int
    full: PagedKv
    window: PagedKv
    states: StateBatch
    cache: CachePool
