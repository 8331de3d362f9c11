"""The ops around attention: what each does for every backend, and its definition in torch.

Shape letters: T tokens, S sequences, R request rows, P pages per row, Hq query heads, Hk KV heads, D head size of
queries and keys, Dv of values, L token locations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor


class KvCache(NamedTuple):
    """The KV cache of a layer, by location.

    v may be a view into k's rows: a token's value is then a part of its key (latent attention), and v has the scales of
    k. Entries are of the step's dtype or smaller. Scales are those of 8-bit caches, None otherwise: a head's entries
    are its codes times its scale, and its largest entry has the largest code. Codes are int8, -127..127, or uint8, the
    bytes of FP8 (E4M3), -448..448.
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
    one_each: bool = False  # each sequence has one query, over the tokens selected for it: pages of one token
    causal: bool = True  # else each query sees all of its sequence, whose tokens are the step's: see `segments`
    plans: dict[Hashable, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a backend has worked out once, for the layers to come."""

    def mapped(self, page_map: Tensor, out_cache_loc: Tensor) -> PagedKv:
        """Return the same sequences in a cache that keeps page p as page_map[p]."""
        return replace(self, page_map=page_map, out_cache_loc=out_cache_loc)

    def with_lens(self, seq_lens: Tensor) -> PagedKv:
        """Return the sequences with other lengths [S] int32."""
        return replace(self, seq_lens=seq_lens)


LARGEST_CODE: Final = {torch.int8: 127.0, torch.uint8: 448.0}  # of the codes of 8-bit caches, by their dtype


class AttentionOps:
    """Rotary embedding, KV writes and attention over pages, defined in torch."""

    def apply_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, axes: Tensor | None = None
    ) -> None:
        """Rotate the first R of D dimensions of q [T, Hq, D] and k [T, Hk, D] in place; halves are paired (neox). There
        may be no heads of k.

        positions [T] int64; cos_sin [max_pos, R] float32, cosines in the first half of a row and sines in the second.
        RoFormer, arXiv 2104.09864, section 3.4.2. With `axes` [R / 2] int32 a token has several positions, and
        positions are [A, T]: frequency i has the angle of positions[axes[i]]. M-RoPE, arXiv 2409.12191, section 2.1.
        """
        half = cos_sin.shape[1] // 2
        if axes is None:
            rows = cos_sin[positions]
        else:
            both = torch.cat([axes, axes]).long()
            rows = cos_sin[positions[both].T, torch.arange(2 * half, device=cos_sin.device)]
        cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)

    def store_kv(self, k: Tensor, v: Tensor, cache: KvCache, loc: Tensor) -> None:
        """Write k [T, Hk, D] and v [T, Hk, Dv] to locations loc [T] int64 of the cache.

        If a head's key, as it is kept, is not finite, its value becomes NaN (its scale, in 8-bit caches). The token's
        own attention is then NaN too, with any weight of that value, so a non-finite key cannot hide in the cache.
        """
        kept = k.to(cache.k.dtype) if cache.k_scale is None else k
        finite = kept.isfinite().all(dim=-1, keepdim=True)
        if cache.v.data_ptr() == cache.k.data_ptr():
            _keep(k.masked_fill(~finite, torch.nan), cache.k, loc, cache.k_scale)
        else:
            _keep(k, cache.k, loc, cache.k_scale)
            _keep(v.masked_fill(~finite, torch.nan), cache.v, loc, cache.v_scale)

    def rope_and_store_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: KvCache,
        loc: Tensor,
        *,
        axes: Tensor | None = None,
    ) -> None:
        """`apply_rope` to q and k, in place, then `store_kv`, in one pass."""
        self.apply_rope(q, k, positions, cos_sin, axes=axes)
        self.store_kv(k, v, cache, loc)

    def paged_attention(
        self,
        q: Tensor,
        cache: KvCache,
        paged: PagedKv,
        *,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries q [T, Hq, D] over paged KV -> [T, Hq, Dv]. If `paged` is not causal, a
        query sees its whole sequence, and there is no window.

        Query head h reads KV head h // (Hq / Hk). With a sliding window w > 0 a query sees itself and the w - 1
        positions before it; a query of a sequence without tokens gives NaN. `ahead` [T] int32 are the positions behind
        its own, in its sequence, that a query sees too: those of its picture, where attention within pictures is in
        both directions. A location that no query sees, be it padding, another sequence's or out of the window, may
        hold anything, NaN included (C5). sinks [Hq] float32 are logits that take part in each head's softmax without a
        value (gpt-oss). With a `softcap` each score s, before the softmax, becomes softcap * tanh(s / softcap) (Gemma
        2, arXiv 2408.00118, section 2), and NaN if it is not finite: capped, it would pass for a number.
        """
        out = torch.empty(*q.shape[:2], cache.v.shape[2], dtype=q.dtype)
        starts, lens = paged.q_start.tolist(), paged.seq_lens.tolist()
        for i, row in enumerate(paged.rows.tolist()):
            first, end, length = starts[i], starts[i + 1], lens[i]
            if first == end:
                continue
            if length == 0:
                out[first:end] = torch.nan
                continue
            query_positions = torch.arange(length - (end - first), length)
            if not paged.causal:
                query_positions.fill_(length - 1)
            last = query_positions if ahead is None else query_positions + ahead[first:end]
            k, v = (
                keys_of(cache.k, cache.k_scale, paged, row, length),
                keys_of(cache.v, cache.v_scale, paged, row, length),
            )
            visible = visible_keys(query_positions, length, sliding_window, last)
            out[first:end] = self._attend(q[first:end], k, v, visible, scale, sinks, softcap)
        return out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        scale: float,
        sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """Attention of one sequence: q [n, Hq, D] over k [L, Hk, D] and v [L, Hk, Dv], as far as they are `visible`
        [n, L] bool -> [n, Hq, Dv]."""
        groups = q.shape[1] // k.shape[1]
        # Keys that no query sees may hold NaN, and 0 x NaN is NaN: V is masked as well as the scores (C5).
        seen = visible.any(dim=0).view(-1, 1, 1)
        k32 = k.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
        v32 = v.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", q.float(), k32) * scale
        if softcap:
            scores = torch.where(scores.isfinite(), softcap * torch.tanh(scores / softcap), torch.nan)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        return torch.einsum("hnl,lhd->nhd", weights, v32).to(q.dtype)


def segments(lens: Sequence[int], device: torch.device | str) -> PagedKv:
    """Return the tokens of a step without a cache, in segments of `lens`, in which they attend to each other both ways:
    the caches are the step's own k and v [T, Hk, D], whose rows may be views into wider ones."""
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
    return segments_from(starts.to(device), sum(lens), max(lens, default=1))


def segments_from(q_start: Tensor, num_tokens: int, longest: int) -> PagedKv:
    """As `segments`, by where each begins and the last one ends, q_start [S + 1] int32, which the host need not know;
    none has more than `longest` tokens.

    A page is a token. Row t of the page table has tokens t, t + 1 and so on: a segment's is that of its first token.
    """
    tokens = torch.arange(num_tokens + longest, dtype=torch.int32, device=q_start.device)
    return PagedKv(
        page_table=tokens.unfold(0, longest, 1),  # rows are one entry apart, and overlap
        rows=q_start[:-1],
        q_start=q_start,
        seq_lens=q_start[1:] - q_start[:-1],
        page_size=1,
        out_cache_loc=torch.empty(0, dtype=torch.int64, device=q_start.device),
        causal=False,
    )


def visible_keys(positions: Tensor, num_keys: int, sliding_window: int, last: Tensor | None = None) -> Tensor:
    """Return which of keys 0 to num_keys - 1 queries at `positions` [n] see, [n, num_keys] bool: up to `last` [n], by
    default their own positions."""
    keys = torch.arange(num_keys)
    visible = keys <= (positions if last is None else last).unsqueeze(1)
    return visible & (keys > positions.unsqueeze(1) - sliding_window) if sliding_window > 0 else visible


def _keep(x: Tensor, cache: Tensor, loc: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        cache[loc] = x.to(cache.dtype)
        return
    most = LARGEST_CODE[cache.dtype]
    scale[loc] = x.float().abs().amax(dim=-1) / most
    codes = (x.float() / scale[loc].unsqueeze(-1)).nan_to_num(nan=0.0).clamp(-most, most)
    cache[loc] = codes.to(torch.float8_e4m3fn).view(torch.uint8) if cache.dtype == torch.uint8 else codes.round().char()


def keys_of(cache: Tensor, scale: Tensor | None, paged: PagedKv, row: int, length: int) -> Tensor:
    """Return the entries of the first `length` positions of a request row, [length, Hk, D]: keys, or values."""
    positions = torch.arange(length)
    pages = paged.page_table[row, positions // paged.page_size].long()
    pages = pages if paged.page_map is None else paged.page_map[pages].long()
    locations = pages * paged.page_size + positions % paged.page_size
    return cache[locations] if scale is None else code_values(cache[locations]) * scale[locations].unsqueeze(-1)


def code_values(codes: Tensor) -> Tensor:
    """Return the numbers that the codes of an 8-bit cache stand for."""
    return codes.view(torch.float8_e4m3fn).float() if codes.dtype == torch.uint8 else codes
