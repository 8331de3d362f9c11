"""Compressed attention: entries of blocks, and attention over a window of tokens and entries.

A program computes one entry, or some heads of one token: no result depends on the other tokens of a step.

Shape letters: T tokens, M blocks that a step ends at most, C the size of a token's state, D that of an entry or a head,
Hq query heads.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.accept import by_token
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.compression import Blocks, CompressionOps, TokenRing
from forebay.ops.triton.attention import LOG2_E, attended, rotate
from forebay.ops.triton.codes import kept_numbers
from forebay.ops.triton.common import dot
from forebay.ops.triton.launch import kernel

_ENTRIES: Final = 4096  # states of tokens times channels in one program
_HEADS: Final = 16  # of a program: the least that a matrix unit takes


@kernel
@triton.jit
def _compress(
    kv, gate, bias, kept_kv, kept_gate, tokens, places, in_step, exists, out, kv_stride, gate_stride,
    WIDTH: tl.constexpr, RATE: tl.constexpr, SPAN: tl.constexpr, SPAN_BLOCK: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one block's entry: the mean of its tokens, weighted by the softmax of their gates."""
    block = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, SPAN_BLOCK)
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    at = block * SPAN + b
    there = tl.load(exists + at, mask=b < SPAN, other=0) != 0
    here = tl.load(in_step + at, mask=b < SPAN, other=0) != 0
    token = tl.load(tokens + at, mask=b < SPAN, other=0)[:, None]
    place = tl.load(places + at, mask=b < SPAN, other=0)[:, None] * WIDTH
    channel = tl.where(b < SPAN - RATE, 0, WIDTH - D)[:, None] + d[None, :]
    live = there[:, None] & (d < D)[None, :]
    own, kept = live & here[:, None], live & ~here[:, None]
    gates = tl.load(gate + token * gate_stride + channel, mask=own, other=0.0).to(tl.float32)
    gates += tl.load(kept_gate + place + channel, mask=kept, other=0.0).to(tl.float32)
    gates += tl.load(bias + (b % RATE)[:, None] * WIDTH + channel, mask=live, other=0.0)
    gates = tl.where(live, gates, float("-inf"))
    top = tl.max(gates, 0)
    weights = tl.exp(gates - tl.where(top == float("-inf"), 0.0, top)[None, :])
    values = tl.load(kv + token * kv_stride + channel, mask=own, other=0.0).to(tl.float32)
    values += tl.load(kept_kv + place + channel, mask=kept, other=0.0).to(tl.float32)
    ends = tl.load(exists + block * SPAN + SPAN - 1) != 0
    mean = tl.sum(values * weights, 0) / tl.where(ends & (d < D), tl.sum(weights, 0), 1.0)
    tl.store(out + block * D + d, mean.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _add_keys(
    top, total, acc, queries, cache, factors, slot, seen, slot_stride, scale, D: tl.constexpr, D_BLOCK: tl.constexpr,
    IN_CODES: tl.constexpr,
):  # fmt: skip
    """The sums of a softmax with those of more keys, which are their values, too. Keys that are not seen may hold NaN,
    and 0 x NaN is NaN: values are masked as well as scores (C5)."""
    d = tl.arange(0, D_BLOCK)
    keys = tl.load(cache + slot[None, :] * slot_stride + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0)
    if IN_CODES:
        keys = kept_numbers(keys, queries.dtype)
        factor = tl.load(factors + slot, mask=seen, other=0.0)[None, :]
    scores = dot(queries, keys) * (scale * LOG2_E)
    if IN_CODES:
        scores *= factor
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    if IN_CODES:
        weights *= factor
    acc = acc * shrink[:, None] + dot(weights.to(keys.dtype), tl.trans(keys))
    return higher, total, acc


@kernel
@triton.jit
def _attend_entries(
    q, positions, rows, keys, key_factors, page_table, page_map, entries, entry_factors, entry_table, entry_rows, lens,
    sinks, out, scale, q_token, q_head, key_slot, entry_slot, table_row, entry_table_row, num_heads,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, ENTRY_PAGE: tl.constexpr, HAS_MAP: tl.constexpr,
    IN_CODES: tl.constexpr, ENTRIES_IN_CODES: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: over the tokens of its window, in blocks that begin at multiples of KEYS positions, then
    over its entries, with one softmax."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D_BLOCK)
    live = (head < num_heads)[:, None] & (d < D)[None, :]
    queries = tl.load(q + token * q_token + head[:, None] * q_head + d[None, :], mask=live, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D_BLOCK], tl.float32)

    position = tl.load(positions + token)
    oldest = tl.maximum(position - WINDOW + 1, 0)
    table = page_table + tl.load(rows + token).to(tl.int64) * table_row
    for start in range(oldest // KEYS * KEYS, position + 1, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = (at >= oldest) & (at <= position)
        page = tl.load(table + at // PAGE, mask=seen, other=0)
        if HAS_MAP:
            page = tl.load(page_map + page, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE + at % PAGE
        top, total, acc = _add_keys(
            top, total, acc, queries, keys, key_factors, slot, seen, key_slot, scale, D, D_BLOCK, IN_CODES
        )

    length = tl.load(lens + token)
    table = entry_table + tl.load(entry_rows + token).to(tl.int64) * entry_table_row
    for start in range(0, length, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = at < length
        page = tl.load(table + at // ENTRY_PAGE, mask=seen, other=0)
        slot = page.to(tl.int64) * ENTRY_PAGE + at % ENTRY_PAGE
        top, total, acc = _add_keys(
            top, total, acc, queries, entries, entry_factors, slot, seen, entry_slot, scale, D, D_BLOCK,
            ENTRIES_IN_CODES,
        )  # fmt: skip

    sink = tl.load(sinks + head, mask=head < num_heads, other=0.0)
    result = attended(top, total, acc, sink, True)
    result = tl.where(length < 0, float("nan"), result)
    to = out + (token * num_heads + head)[:, None] * D + d[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=live)


class TritonCompression(CompressionOps):
    """See `CompressionOps`. Blocks are planned by the reference's own torch."""

    def compress(self, kv: Tensor, gate: Tensor, bias: Tensor, state: TokenRing, blocks: Blocks) -> Tensor:
        (rate, width), (count, span) = bias.shape, blocks.tokens.shape
        size = width * rate // span
        out = kv.new_empty(count, size)
        span_block = triton.next_power_of_2(span)
        size_block = min(triton.next_power_of_2(size), max(16, _ENTRIES // span_block))
        if count:
            _compress[(count, triton.cdiv(size, size_block))](
                kv,
                gate,
                bias,
                *state,
                blocks.tokens,
                blocks.places,
                blocks.in_step,
                blocks.exists,
                out,
                kv.stride(0),
                gate.stride(0),
                WIDTH=width,
                RATE=rate,
                SPAN=span,
                SPAN_BLOCK=span_block,
                D=size,
                D_BLOCK=size_block,
            )
        for own, kept in ((kv, state.kv), (gate, state.gate)):
            kept.flatten(0, 1).index_copy_(0, blocks.kept_at, own.to(kept.dtype))
        return out

    def unrotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        rotate(x, x[:, :0], positions, cos_sin, back=True)

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
        num_tokens, num_heads, d = q.shape
        out = q.new_empty(q.shape)
        if not num_tokens:
            return out
        (cache, paged), (packed, seen) = tokens, entries
        seqs, _ = by_token(paged.q_start, num_tokens)
        d_block = max(16, triton.next_power_of_2(d))
        _attend_entries[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            q,
            positions,
            paged.rows.index_select(0, seqs),
            cache.k,
            cache.k_scale,
            paged.page_table,
            paged.page_map,
            packed.k,
            packed.k_scale,
            seen.page_table,
            seen.rows,
            seen.seq_lens,
            sinks,
            out,
            scale,
            q.stride(0),
            q.stride(1),
            cache.k.stride(0),
            packed.k.stride(0),
            paged.page_table.stride(0),
            seen.page_table.stride(0),
            num_heads,
            WINDOW=window,
            PAGE=paged.page_size,
            ENTRY_PAGE=seen.page_size,
            HAS_MAP=paged.page_map is not None,
            IN_CODES=cache.k_scale is not None,
            ENTRIES_IN_CODES=packed.k_scale is not None,
            D=d,
            D_BLOCK=d_block,
            HEADS=_HEADS,
            KEYS=16 if d_block * q.itemsize > 1024 else 32,
        )
        return out
