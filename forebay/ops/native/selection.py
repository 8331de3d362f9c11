"""The native twins of the ops in selection.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.native.kernels import Kernels, address, view
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.selection import SelectionOps, num_selected, token_sequences


class NativeSelection(SelectionOps):
    """See `SelectionOps`. Every tensor is contiguous but for keys, whose locations may lie apart."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._select_tokens = kernels.by_cache_dtype("fb_select_tokens_{}_{}")
        self._block_tokens = kernels.bind("fb_block_tokens")
        self._token_pages = kernels.bind("fb_token_pages")

    def select_tokens(
        self, q: Tensor, weights: Tensor, keys: KvCache, paged: PagedKv, top_k: int
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, head_dim = q.shape
        most = num_selected(paged, top_k)
        positions, counts = paged.rows.new_empty(tokens, most), paged.rows.new_empty(tokens)
        self._select_tokens[q.dtype, keys.k.dtype](
            self._pool,
            q.data_ptr(),
            weights.data_ptr(),
            heads if len(weights) == tokens else 0,
            keys.k.data_ptr(),
            keys.k.stride(0),
            address(keys.k_scale),
            *_pages(paged),
            paged.seq_lens.data_ptr(),
            len(paged.rows),
            paged.page_size,
            heads,
            head_dim,
            most,
            positions.data_ptr(),
            counts.data_ptr(),
        )
        return positions, counts

    def block_tokens(
        self, blocks: Tensor, counts: Tensor, positions: Tensor, paged: PagedKv, rate: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens, most = blocks.shape
        tokens, totals = blocks.new_empty(num_tokens, most * rate + rate - 1), counts.new_empty(num_tokens)
        given = blocks.data_ptr(), counts.data_ptr(), positions.data_ptr()
        sequences = paged.q_start.data_ptr(), paged.seq_lens.data_ptr(), len(paged.rows)
        self._block_tokens(self._pool, *given, *sequences, most, rate, tokens.data_ptr(), totals.data_ptr())
        return tokens, totals

    def token_pages(self, positions: Tensor, counts: Tensor, paged: PagedKv) -> PagedKv:
        tokens, most = positions.shape
        locations, rows, starts = (positions.new_empty(size) for size in ((tokens, most), (tokens,), (tokens + 1,)))
        made = positions.data_ptr(), locations.data_ptr(), rows.data_ptr(), starts.data_ptr()
        self._token_pages(self._pool, *made, *_pages(paged), len(paged.rows), paged.page_size, most)
        return token_sequences(locations, rows, starts, counts, paged)


def _pages(paged: PagedKv) -> tuple[int | None, ...]:
    return *view(paged.page_table), address(paged.page_map), paged.rows.data_ptr(), paged.q_start.data_ptr()
