"""The native twins of the ops in compression.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels, address, view
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.compression import (
    Blocks,
    Compression,
    CompressionOps,
    TokenRing,
    entry_sequences,
    most_blocks,
)


class NativeCompression(CompressionOps):
    """See `CompressionOps`. Every tensor is contiguous but for a step's states, and caches, whose locations may be
    apart. States in place 0 of the rings, the padding, are not written."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._plan_blocks = kernels.bind("fb_plan_blocks")
        self._entry_pages = kernels.bind("fb_entry_pages")
        self._selected_lens = kernels.bind("fb_selected_lens")
        self._first_positions = kernels.bind("fb_first_positions")
        self._compress = kernels.by_dtype("fb_compress_{}")
        self._unrotate = kernels.by_dtype("fb_unrotate_{}")
        self._compressed_attention = kernels.by_cache_dtype("fb_compressed_attention_{}_{}")

    def plan_blocks(self, positions: Tensor, loc: Tensor, paged: PagedKv, compression: Compression) -> Blocks:
        most, span = most_blocks(len(positions), len(paged.rows), compression.rate), compression.span
        blocks = Blocks(
            tokens=positions.new_empty(most, span),
            places=positions.new_empty(most, span),
            in_step=torch.empty(most, span, dtype=torch.bool),
            exists=torch.empty(most, span, dtype=torch.bool),
            first=positions.new_empty(most),
            loc=positions.new_empty(most),
            kept_at=positions.new_empty(len(positions)),
        )
        sizes = (paged.page_size, compression.rate, span, compression.ring, compression.by_row, most)
        made = (blocks.tokens, blocks.places, blocks.in_step, blocks.exists, blocks.first, blocks.loc, blocks.kept_at)
        given = positions.data_ptr(), loc.data_ptr(), *_pages(paged)
        self._plan_blocks(self._pool, *given, *sizes, *(tensor.data_ptr() for tensor in made))
        return blocks

    def compress(self, kv: Tensor, gate: Tensor, bias: Tensor, state: TokenRing, blocks: Blocks) -> Tensor:
        (most, span), (rate, width) = blocks.tokens.shape, bias.shape
        size = width * rate // span
        out = kv.new_empty(most, size)
        given = (*view(kv), *view(gate), bias.data_ptr(), state.kv.data_ptr(), state.gate.data_ptr())
        planned = (blocks.tokens, blocks.places, blocks.in_step, blocks.exists, blocks.kept_at)
        sizes = (most, span, rate, size, width, len(kv))
        self._compress[kv.dtype](self._pool, *given, *(tensor.data_ptr() for tensor in planned), out.data_ptr(), *sizes)
        return out

    def first_positions(self, positions: Tensor, kept: Tensor, blocks: Blocks) -> Tensor:
        axes, num_tokens = positions.shape
        most, span = blocks.tokens.shape
        out = positions.new_empty(axes, most)
        planned = (blocks.tokens, blocks.places, blocks.in_step, blocks.exists, blocks.kept_at)
        given = (positions.data_ptr(), *positions.stride(), axes, kept.data_ptr())
        made = (*(tensor.data_ptr() for tensor in planned), most, span, out.data_ptr())
        self._first_positions(self._pool, *given, num_tokens, *made)
        return out

    def unrotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        tokens, heads, dim = x.shape
        angles = positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1]
        self._unrotate[x.dtype](self._pool, *view(x), heads, dim, *angles, tokens)

    def entry_pages(self, positions: Tensor, paged: PagedKv, rate: int) -> PagedKv:
        tokens = len(positions)
        rows, starts, lens = (paged.rows.new_empty(size) for size in (tokens, tokens + 1, tokens))
        given = positions.data_ptr(), paged.rows.data_ptr(), paged.q_start.data_ptr(), len(paged.rows), rate
        self._entry_pages(self._pool, *given, rows.data_ptr(), starts.data_ptr(), lens.data_ptr())
        return entry_sequences(rows, starts, lens, paged, rate)

    def selected_lens(self, seen: Tensor, counts: Tensor) -> Tensor:
        lens = torch.empty_like(seen)
        self._selected_lens(self._pool, seen.data_ptr(), counts.data_ptr(), lens.data_ptr(), len(seen))
        return lens

    def compressed_attention(
        self,
        q: Tensor,
        positions: Tensor,
        tokens: tuple[KvCache, PagedKv],
        entries: tuple[KvCache, PagedKv],
        *,
        scale: float,
        window: int,
        sinks: Tensor,
    ) -> Tensor:
        out = torch.empty_like(q)
        (cache, paged), (packed, seen) = tokens, entries
        assert seen.page_map is None, "entries are in the pages of full KV"
        self._compressed_attention[q.dtype, cache.k.dtype](
            self._pool,
            q.data_ptr(),
            positions.data_ptr(),
            *_keys(cache),
            *_pages(paged),
            paged.page_size,
            window,
            *_keys(packed),
            *view(seen.page_table),
            seen.rows.data_ptr(),
            seen.seq_lens.data_ptr(),
            seen.page_size,
            scale,
            sinks.data_ptr(),
            out.data_ptr(),
            *q.shape,
        )
        return out


def _keys(cache: KvCache) -> tuple[int | None, ...]:
    return cache.k.data_ptr(), cache.k.stride(0), address(cache.k_scale)


def _pages(paged: PagedKv) -> tuple[int | None, ...]:
    pages = *view(paged.page_table), address(paged.page_map), paged.rows.data_ptr(), paged.q_start.data_ptr()
    return *pages, len(paged.rows)
