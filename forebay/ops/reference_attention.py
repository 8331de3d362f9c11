"""The definition in torch of the ops in attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.attention import KvCache, PagedKv


class TorchAttention:
    """See `AttentionOps`."""

    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)

    def store_kv(self, k: Tensor, v: Tensor, cache: KvCache, loc: Tensor) -> None:
        kept = k.to(cache.k.dtype) if cache.k_scale is None else k
        finite = kept.isfinite().all(dim=-1, keepdim=True)
        if cache.v.data_ptr() == cache.k.data_ptr():
            _keep(k.masked_fill(~finite, torch.nan), cache.k, loc, cache.k_scale)
        else:
            _keep(k, cache.k, loc, cache.k_scale)
            _keep(v.masked_fill(~finite, torch.nan), cache.v, loc, cache.v_scale)

    def rope_and_store_kv(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, cache: KvCache, loc: Tensor
    ) -> None:
        self.apply_rope(q, k, positions, cos_sin)
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
    ) -> Tensor:
        out = torch.empty(*q.shape[:2], cache.v.shape[2], dtype=q.dtype)
        starts, lens, size = paged.q_start.tolist(), paged.seq_lens.tolist(), paged.page_size
        for i, row in enumerate(paged.rows.tolist()):
            first, end, length = starts[i], starts[i + 1], lens[i]
            if first == end:
                continue
            positions = torch.arange(length)
            pages = paged.page_table[row, positions // size].long()
            pages = pages if paged.page_map is None else paged.page_map[pages].long()
            locations = pages * size + positions % size
            query_positions = torch.arange(length - (end - first), length)
            k, v = _at(cache.k, locations, cache.k_scale), _at(cache.v, locations, cache.v_scale)
            out[first:end] = _attend(q[first:end], k, v, query_positions, scale, sliding_window, sinks)
        return out


def _keep(x: Tensor, cache: Tensor, loc: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        cache[loc] = x.to(cache.dtype)
        return
    scale[loc] = x.float().abs().amax(dim=-1) / 127
    codes = x.float() / scale[loc].unsqueeze(-1)
    cache[loc] = codes.nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8)


def _at(cache: Tensor, locations: Tensor, scale: Tensor | None) -> Tensor:
    return cache[locations] if scale is None else cache[locations] * scale[locations].unsqueeze(-1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, sliding_window: int, sinks: Tensor | None
) -> Tensor:
    """q [n, Hq, D] at `positions`, over k [L, Hk, D] and v [L, Hk, Dv] -> [n, Hq, Dv]."""
    groups = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[0])
    visible = keys <= positions.unsqueeze(1)
    if sliding_window > 0:
        visible &= keys > positions.unsqueeze(1) - sliding_window
    # Keys that no query sees may hold NaN, and 0 x NaN is NaN: V is masked as well as the scores (C5).
    seen = visible.any(dim=0).view(-1, 1, 1)
    k32 = k.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
    v32 = v.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k32) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v32).to(q.dtype)
