"""The ops around attention: what each does, for every backend.

Shape letters: T tokens, S sequences, R request rows, P pages per row, Hq query heads, Hk KV heads, D head size of
queries and keys, Dv of values, L token locations.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor


class KvCache(NamedTuple):
    """What a layer keeps of each token, by location.

    v may be a view into k's rows: a token's value is then what lies in its key at that place (latent attention), and v
    has the scales of k. Entries are of the step's dtype or smaller. Scales are those of int8 caches, None otherwise: a
    head's entries are its codes, -127..127, times its scale, the largest entry / 127.
    """

    k: Tensor  # [L, Hk, D]
    v: Tensor  # [L, Hk, Dv]
    k_scale: Tensor | None = None  # [L, Hk] float32
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKv:
    """Where a step's sequences have their KV, for all layers that find it alike. Its tensors do not change before the
    last of these layers has run.

    Sequence i's queries are q_start[i]..q_start[i+1]; the last of them is at position seq_lens[i] - 1. The KV of
    position p is at location page_table[rows[i], p // page_size] * page_size + p % page_size. With a `page_map` page p
    of the table stands for page page_map[p] of the caches (windowed layers have fewer pages).
    """

    page_table: Tensor  # [R + 1, P] int32
    rows: Tensor  # [S] int32
    q_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    page_size: int
    out_cache_loc: Tensor  # [T] int64, the locations of the step's own tokens
    page_map: Tensor | None = None  # [pages + 1] int32
    plans: dict[Hashable, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a backend has worked out once, for the layers to come."""


class AttentionOps(Protocol):
    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate the first R of D dimensions of q [T, Hq, D] and k [T, Hk, D] in place; halves are paired (neox).

        positions [T] int64; cos_sin [max_pos, R] float32, cosines in the first half of a row and sines in the second.
        RoFormer, arXiv 2104.09864, section 3.4.2.
        """
        ...

    def store_kv(self, k: Tensor, v: Tensor, cache: KvCache, loc: Tensor) -> None:
        """Write k [T, Hk, D] and v [T, Hk, Dv] to locations loc [T] int64 of the cache.

        Where a head's key, as it is kept, is not finite its value becomes NaN (its scale, in int8 caches), so that the
        token's own attention, whatever it weighs that value with, is NaN too and nothing can hide in the cache.
        """
        ...

    def rope_and_store_kv(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, cache: KvCache, loc: Tensor
    ) -> None:
        """`apply_rope` to q and k, in place, then `store_kv`, in one pass."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        cache: KvCache,
        paged: PagedKv,
        *,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries q [T, Hq, D] over paged KV -> [T, Hq, Dv].

        Query head h reads KV head h // (Hq / Hk). With a sliding window w > 0 a query sees itself and the w - 1
        positions before it. A location that no query sees, be it padding, another sequence's or out of the window, may
        hold anything, NaN included (C5). sinks [Hq] float32 are logits that take part in each head's softmax without a
        value (gpt-oss).
        """
        ...
