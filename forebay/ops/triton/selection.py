"""The selection of tokens for sparse attention: scores by a kernel, for some queries at a time, and torch's sort."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.selection import SelectionOps, num_selected
from forebay.ops.triton.codes import kept_numbers
from forebay.ops.triton.common import dot
from forebay.ops.triton.launch import kernel

_QUERIES: Final = 64  # that are scored at once
_KEYS: Final = 64  # of one program


@kernel
@triton.jit(do_not_specialize=["first"])
def _index_scores(
    q,
    weights,
    keys,
    factors,
    page_table,
    page_map,
    rows,
    positions,
    out,
    first,
    pages_per_row,
    slot_stride,
    weights_row,
    context,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IN_CODES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Scores of one query for KEYS positions: -inf for those that it does not see."""
    token = first + tl.program_id(0)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    seen = key <= tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(page_table + row * pages_per_row + key // PAGE, mask=seen, other=0)
    if HAS_MAP:
        page = tl.load(page_map + page, mask=seen, other=0)
    slot = page.to(tl.int64) * PAGE + key % PAGE
    head = tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, D_BLOCK)
    of_heads = (token.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(q + of_heads, mask=(head < HEADS)[:, None] & (d < D)[None, :], other=0.0)
    kept = tl.load(keys + slot[None, :] * slot_stride + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0)
    if IN_CODES:
        kept = kept_numbers(kept, q.dtype.element_ty)
    else:
        kept = kept.to(q.dtype.element_ty)
    scores = dot(queries, kept)
    if IN_CODES:
        scores *= tl.load(factors + slot, mask=seen, other=0.0)[None, :]
    scores = tl.where(scores < 0, 0.0, scores)  # a NaN stays one
    weight = tl.load(weights + token * weights_row + head, mask=head < HEADS, other=0.0)
    total = tl.sum(weight[:, None] * scores, 0)
    at = out + tl.program_id(0).to(tl.int64) * context + key
    tl.store(at, tl.where(seen, total, float("-inf")), mask=key < context)


class TritonSelection(SelectionOps):
    """See `SelectionOps`. Scores of a block of queries are as long as a row of the page table, however many tokens
    there are, so that a captured step needs no length."""

    def select_tokens(
        self, q: Tensor, weights: Tensor, keys: KvCache, paged: PagedKv, top_k: int
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, head_dim = q.shape
        most, context = num_selected(paged, top_k), paged.page_table.shape[1] * paged.page_size
        lengths = paged.q_start[1:] - paged.q_start[:-1]
        row = paged.rows.repeat_interleave(lengths, output_size=tokens)
        ends = (paged.seq_lens - paged.q_start[1:]).repeat_interleave(lengths, output_size=tokens)
        position = torch.arange(tokens, dtype=torch.int32, device=q.device) + ends
        pages = paged.page_table[row, position // paged.page_size]
        pages = pages if paged.page_map is None else paged.page_map[pages]
        own = pages * paged.page_size + position % paged.page_size
        kept = keys.k[:, 0, 0] if keys.k_scale is None else keys.k_scale[:, 0]
        fails = kept[own].isnan()
        counts = (position + 1).clamp(max=most)
        chosen = torch.empty(tokens, most, dtype=torch.int32, device=q.device)
        scores = torch.empty(min(tokens, _QUERIES), context, dtype=torch.float32, device=q.device)
        for first in range(0, tokens, _QUERIES):
            count = min(_QUERIES, tokens - first)
            _index_scores[(count, triton.cdiv(context, _KEYS))](
                q,
                weights,
                keys.k,
                keys.k_scale,
                paged.page_table,
                paged.page_map,
                row,
                position,
                scores,
                first,
                paged.page_table.stride(0),
                keys.k.stride(0),
                heads if len(weights) == tokens else 0,
                context,
                HEADS=heads,
                HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
                D=head_dim,
                D_BLOCK=max(16, triton.next_power_of_2(head_dim)),
                PAGE=paged.page_size,
                HAS_MAP=paged.page_map is not None,
                IN_CODES=keys.k_scale is not None,
                KEYS=_KEYS,
            )
            here = slice(first, first + count)
            at = position[here].long().clamp(min=0).unsqueeze(1)  # -1 where nothing is seen
            fails[here] |= scores[:count].gather(1, at)[:, 0].isnan() & (position[here] >= most)
            counts[here] = counts[here].masked_fill(fails[here], 0)
            best = scores[:count].nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            best = best.sort(dim=-1, descending=True, stable=True).indices[:, :most].int()
            behind = torch.arange(most, device=q.device) >= counts[here].unsqueeze(1)
            ordered = best.masked_fill_(behind, context).sort(dim=-1).values
            chosen[here] = ordered.masked_fill_(behind, -1)
        return chosen, counts
