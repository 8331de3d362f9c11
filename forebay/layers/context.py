"""What a layer may know about the step it runs in. No ambient state: this is an argument.

Shape letters: T tokens, S sequences, R request rows, P pages per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.pools.kv_pool import KvPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Sequence i's tokens are q_start[i]..q_start[i+1]; after the step it has seq_lens[i] tokens of KV.

    Positions are contiguous and end at seq_lens[i] - 1; attention is causal over the row's pages.
    """

    positions: Tensor  # [T] int64
    out_cache_loc: Tensor  # [T] int64: page * page_size + offset
    rows: Tensor  # [S] int32
    q_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    page_table: Tensor  # [R + 1, P] int32: the device's req_to_token, one entry per page
    page_size: int
    max_seq_len: int
    kv: KvPool
