"""The ops around attention: what each does, for every backend.

Shape letters: T tokens, S sequences, R request rows, P pages per row, Hq query heads, Hk KV heads, D head size of
queries and keys, Dv of values.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionOps(Protocol):
    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate the first R of D dimensions of q [T, Hq, D] and k [T, Hk, D] in place; halves are paired (neox).

        positions [T] int64; cos_sin [max_pos, R] float32, cosines in the first half of a row and sines in the second.
        RoFormer, arXiv 2104.09864, section 3.4.2.
        """
        ...

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Write k [T, Hk, D] and v [T, Hk, Dv] to slots loc [T] int64 of the caches [slots, Hk, D] and [slots, Hk, Dv].

        v_cache may be a view into k_cache's rows: v is then what lies in k at that place. int8 caches have scales
        [slots, Hk] float32: a head's entries are its codes, -127..127, times its scale, the largest entry / 127.

        Where a head's key is not finite its value becomes NaN (its scale, in int8 caches), so that the token's own
        attention, whatever it weighs that value with, is NaN too and nothing can hide in the cache.
        """
        ...

    def rope_and_store_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """`apply_rope` to q and k, in place, then `store_kv`, in one pass."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_lens: Tensor,
        page_size: int,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
        page_map: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries q [T, Hq, D] over paged KV -> [T, Hq, Dv].

        Sequence i's queries are q_start[i]..q_start[i+1]; the last of them is at position seq_lens[i] - 1. The KV of
        position p is in slot page_table[rows[i], p // page_size] * page_size + p % page_size. With a `page_map`
        [pages + 1] page p of the table stands for page page_map[p] of the caches (windowed layers have fewer pages).
        Query head h reads KV head h // (Hq / Hk). With a sliding window w > 0 a query sees itself and the w - 1
        positions before it. page_table [R + 1, P], page_map, rows [S], q_start [S + 1], seq_lens [S] are int32. A slot
        that no query sees, be it padding, another sequence's or out of the window, may hold anything, NaN included
        (C5). v_cache's head size Dv may differ from k_cache's, and v_cache may be a view into k_cache's rows (latent
        attention). sinks [Hq] float32 are logits that take part in each head's softmax without a value (gpt-oss).
        Scales as in `store_kv`.
        """
        ...
