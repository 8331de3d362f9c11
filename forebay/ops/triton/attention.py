"""Rotary embedding, KV writes, and attention over pages.

Shape letters: T tokens, S sequences, Hq query heads, Hk KV heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.attention import AttentionOps, KvCache, PagedKv
from forebay.ops.triton.codes import as_floats, kept_numbers
from forebay.ops.triton.common import dot, owner
from forebay.ops.triton.launch import kernel
from forebay.ops.triton.products import chip_of

_PROGRAMS: Final = 128  # that one decoding sequence's attention is divided among: about the multiprocessors of a GPU
_SEGMENT: Final = 512  # keys with sums of their own, at least
_DECODE_ROWS: Final = 16  # the least that a matrix unit takes
_EXTEND_ROWS: Final = 64
_PART_BYTES: Final = 256 << 20  # that the sums of segments may take: more sequences are programs enough
LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in powers of two, which the GPU has an instruction for


@triton.jit
def _rotate(
    x, token, head_stride, num_heads, cos, sin, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    live = (head < num_heads) & (at < HALF)
    place = x + token + head * head_stride + at
    first = tl.load(place, mask=live, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=live, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(x.dtype.element_ty), mask=live)
    tl.store(place + HALF, (second * cos + first * sin).to(x.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _apply_rope(
    q,
    k,
    positions,
    axis_stride,
    cos_sin,
    axes,
    q_token,
    q_head,
    num_q_heads,
    k_token,
    k_head,
    num_k_heads,
    HAS_AXES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    if HAS_AXES:
        axis = tl.load(axes + at, mask=at < HALF, other=0).to(tl.int64)
        position = tl.load(positions + axis * axis_stride + token, mask=at < HALF, other=0)
    else:
        position = tl.load(positions + token)
    angles = cos_sin + position * (2 * HALF) + at
    cos = tl.load(angles, mask=at < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=at < HALF, other=0.0)
    if BACK:
        sin = -sin
    if tl.program_id(1) == 0:
        _rotate(q, token * q_token, q_head, num_q_heads, cos, sin, HALF, HALF_BLOCK, Q_HEADS)
    else:
        _rotate(k, token * k_token, k_head, num_k_heads, cos, sin, HALF, HALF_BLOCK, K_HEADS)


@triton.jit
def _copy_heads(
    x,
    token,
    head_stride,
    cache,
    scales,
    slot,
    slot_stride,
    cache_head,
    num_heads,
    keys,
    key_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_D: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    IN_CODES: tl.constexpr,
):
    """`keys` are the token's; a head whose key is not finite becomes NaN. A KEY_D of 0 is for the keys themselves."""
    at = tl.arange(0, BLOCK)
    to = cache + slot * slot_stride + at
    for head in range(num_heads):
        values = tl.load(x + token + head * head_stride + at, mask=at < D, other=0.0)
        if KEY_D > 0:
            key_at = tl.arange(0, KEY_BLOCK)
            key = tl.load(keys + head * key_stride + key_at, mask=key_at < KEY_D, other=0.0).to(tl.float32)
            spoilt = tl.max((~(tl.abs(key) < float("inf"))).to(tl.int32), 0)  # a NaN is less than nothing
        else:
            spoilt = 0
        if IN_CODES:
            values = values.to(tl.float32)
            largest = tl.max(tl.abs(values), 0)
            broken = tl.max((values != values).to(tl.int32), 0) + spoilt > 0  # which the maximum passes over
            most = 448.0 if cache.dtype.element_ty == tl.uint8 else 127.0
            scale = tl.where(broken, float("nan"), largest / most)
            tl.store(scales + slot * num_heads + head, scale)
            codes = tl.where(scale > 0.0, values / tl.where(scale > 0.0, scale, 1.0), 0.0)
            codes = tl.where(codes == codes, codes, 0.0)
            codes = tl.minimum(tl.maximum(codes, -most), most)
            if cache.dtype.element_ty == tl.uint8:
                values = as_floats(codes)
            else:
                values = (codes + 12582912.0 - 12582912.0).to(tl.int8)  # 1.5 * 2^23: rounds half to even
        else:
            values = tl.where(spoilt > 0, float("nan"), values.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(to + head * cache_head, values, mask=at < D)


@kernel
@triton.jit
def _store_kv(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    loc,
    k_token,
    k_head,
    v_token,
    v_head,
    k_slot,
    k_cache_head,
    v_slot,
    v_cache_head,
    num_heads,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    CHECKED: tl.constexpr,
    IN_CODES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + token)
    keys = k + token * k_token
    if tl.program_id(1) == 0:
        at, to = token * k_token, k_cache_head
        _copy_heads(
            k,
            at,
            k_head,
            k_cache,
            k_scale,
            slot,
            k_slot,
            to,
            num_heads,
            keys,
            k_head,
            D,
            D_BLOCK,
            CHECKED,
            D_BLOCK,
            IN_CODES,
        )
    else:
        at, to = token * v_token, v_cache_head
        _copy_heads(
            v,
            at,
            v_head,
            v_cache,
            v_scale,
            slot,
            v_slot,
            to,
            num_heads,
            keys,
            k_head,
            DV,
            DV_BLOCK,
            D,
            D_BLOCK,
            IN_CODES,
        )


@triton.jit
def _fold(top, total, acc, part_top, part_total, part):
    """Add the sums of the next segment to those of the segments before it, all [rows] or [rows, Dv].

    A segment of which a query sees no key changes no bit. The sum of weights tells, not the largest score: that of
    scores that were NaN is -inf, and the NaN has to come out. The multiplications and additions that may become one
    instruction are written as one, so that each kernel rounds alike.
    """
    computed = part_total != 0.0
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, weight = tl.exp2(top - base), tl.exp2(part_top - base)
    sums = tl.fma(total, shrink, part_total * weight)
    shrinks = tl.broadcast_to(shrink[:, None], acc.shape)
    values = tl.fma(acc, shrinks, part * weight[:, None])
    return (
        tl.where(computed, higher, top),
        tl.where(computed, sums, total),
        tl.where(computed[:, None], values, acc),
    )


@triton.jit
def attended(top, total, acc, sink, HAS_SINKS: tl.constexpr):
    """The attention of folded sums; a sink is a key without a value. A zero is never negative."""
    if HAS_SINKS:
        sink *= LOG2_E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = tl.fma(total, shrink, tl.exp2(sink - higher))
        acc = acc * shrink[:, None]
    return acc / total[:, None] + 0.0


@kernel
@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    page_table,
    page_map,
    rows,
    q_start,
    seq_lens,
    ahead,
    sinks,
    out,
    part_top,
    part_sum,
    part_count,
    capacity,
    num_seqs,
    scale,
    softcap,
    q_token,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_row,
    num_heads,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LATENT: tl.constexpr,
    IN_CODES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of one sequence's queries, HEADS heads of one KV head's group each, over its keys.

    Segments of keys begin at multiples of SEGMENT positions, have sums of their own, and are folded in order: the
    result depends neither on who computes a segment, nor on the other queries of the block.

    PROGRAMS 0: one program folds all, and `out` is [T, Hq, Dv]. Otherwise segments have so many programs in turns, and
    `out` is [T, Hq, capacity, Dv] float32 of sums that `_combine` folds. `part_top` and `part_sum` [T, Hq, capacity]
    are the largest scores and the sums of weights, `part_count` [T] the segments of a token.
    """
    QUERIES: tl.constexpr = ROWS // HEADS
    block = tl.program_id(0)
    kv_head = tl.program_id(1) // CHUNKS
    segment = tl.program_id(2)
    seq = owner(q_start, num_seqs, block, QUERIES)
    first = tl.load(q_start + seq)
    count = tl.load(q_start + seq + 1) - first
    begin = (block - first // QUERIES - seq) * QUERIES
    if begin >= count:
        return

    r = tl.arange(0, ROWS)
    query = begin + r // HEADS
    in_group = tl.program_id(1) % CHUNKS * HEADS + r % HEADS
    live = (r < QUERIES * HEADS) & (query < count) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = (first + query).to(tl.int64)
    before = tl.load(seq_lens + seq) - count
    position = before + query

    stop = before + (tl.minimum(begin + QUERIES, count) if CAUSAL else count)
    last = position if CAUSAL else stop
    if HAS_AHEAD:
        last += tl.load(ahead + token, mask=live, other=0)
        stop = tl.max(tl.where(live, last + 1, 0), 0)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(before + begin - WINDOW + 1, 0)
    first_segment = oldest // SEGMENT
    count_segments = tl.cdiv(stop, SEGMENT) - first_segment

    d = tl.arange(0, D_MAIN)
    tail = D_MAIN + tl.arange(0, D_TAIL if D_TAIL > 0 else 16)
    dv = tl.arange(0, DV_BLOCK)
    q_at = q + token[:, None] * q_token + head[:, None] * q_head
    q_main = tl.load(q_at + d[None, :], mask=live[:, None] & (d[None, :] < D), other=0.0)
    if D_TAIL > 0:
        q_tail = tl.load(q_at + tail[None, :], mask=live[:, None] & (tail[None, :] < D), other=0.0)
    table = page_table + tl.load(rows + seq).to(tl.int64) * table_row
    place = token * num_heads + head
    if PROGRAMS > 0 and tl.program_id(1) + tl.program_id(2) == 0:
        tl.store(part_count + token, tl.zeros([ROWS], tl.int32) + count_segments, mask=live & (head == 0))

    # Blocks of keys in which every query sees each key need no mask: those of positions from `clear` to `clear_stop`.
    clear, clear_stop = oldest, stop
    if CAUSAL:
        clear_stop = before + begin + 1
    if WINDOW > 0:
        clear = tl.maximum(before + tl.minimum(begin + QUERIES, count) - WINDOW, 0)
    unit = 1.0 if HAS_CAP else scale * LOG2_E  # capped scores are powers of two already
    units = tl.full([ROWS, KEYS], 1.0, tl.float32) * unit

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_acc = tl.zeros([ROWS, DV_BLOCK], tl.float32)
    for segment in range(tl.program_id(2), count_segments, PROGRAMS if PROGRAMS > 0 else 1):
        begin_at = (first_segment + segment) * SEGMENT
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_BLOCK], tl.float32)
        for start in range(tl.maximum(begin_at, oldest // KEYS * KEYS), tl.minimum(begin_at + SEGMENT, stop), KEYS):
            key = start + tl.arange(0, KEYS)
            # Keys that no query sees may hold NaN, and 0 x NaN is NaN: values are masked as well as scores (C5).
            seen = (key < stop) & (key >= oldest)
            page = tl.load(table + key // PAGE, mask=seen, other=0)
            if HAS_MAP:
                page = tl.load(page_map + page, mask=seen, other=0)
            slot = page.to(tl.int64) * PAGE + key % PAGE
            k_at = k_cache + slot[None, :] * k_slot + kv_head * k_head
            k_main = tl.load(k_at + d[:, None], mask=seen[None, :] & (d[:, None] < D), other=0)
            if IN_CODES:
                k_main = kept_numbers(k_main, q.dtype.element_ty)
            scores = dot(q_main, k_main)
            if D_TAIL > 0:
                k_tail = tl.load(k_at + tail[:, None], mask=seen[None, :] & (tail[:, None] < D), other=0)
                if IN_CODES:
                    k_tail = kept_numbers(k_tail, q.dtype.element_ty)
                scores += dot(q_tail, k_tail)
            if IN_CODES:
                scale_at = slot * num_kv_heads + kv_head
                scores *= tl.load(k_scale + scale_at, mask=seen, other=0.0)[None, :]
            if HAS_CAP:  # tanh(z) is 2 sigmoid(2 z) - 1; what is not finite becomes NaN
                scores *= scale
                scores = softcap * LOG2_E * (2.0 * tl.sigmoid(2.0 / softcap * scores) - 1.0) + 0.0 * scores
            if (start < clear) | (start + KEYS > clear_stop):
                visible = seen[None, :] & (key[None, :] <= (last[:, None] if CAUSAL else last))
                if WINDOW > 0:
                    visible = visible & (key[None, :] > position[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1) * unit)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(tl.fma(scores, units, tl.broadcast_to(-base[:, None], scores.shape)))
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            if LATENT:
                v = tl.trans(k_main)
            else:
                v_at = v_cache + slot[:, None] * v_slot + kv_head * v_head
                v = tl.load(v_at + dv[None, :], mask=seen[:, None] & (dv[None, :] < DV), other=0)
                if IN_CODES:
                    v = kept_numbers(v, q.dtype.element_ty)
            if IN_CODES:
                weights *= tl.load(v_scale + scale_at, mask=seen, other=0.0)[None, :]
            acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
            top = higher

        if PROGRAMS > 0:
            at = place * capacity + segment
            tl.store(part_top + at, top, mask=live)
            tl.store(part_sum + at, total, mask=live)
            tl.store(out + at[:, None] * DV + dv[None, :], acc, mask=live[:, None] & (dv[None, :] < DV))
        else:
            all_top, all_total, all_acc = _fold(all_top, all_total, all_acc, top, total, acc)

    if PROGRAMS == 0:
        sink = all_top
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0)
        # From memory again: places held through the loops would not fit the registers of an H100.
        place = (tl.load(q_start + seq) + query).to(tl.int64) * num_heads + head
        result = attended(all_top, all_total, all_acc, sink, HAS_SINKS)
        tl.store(
            out + place[:, None] * DV + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=live[:, None] & (dv[None, :] < DV),
        )


@kernel
@triton.jit
def _combine(
    parts,
    part_top,
    part_sum,
    part_count,
    capacity,
    sinks,
    out,
    num_heads,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One head of one token: what its segments' sums come to."""
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    dv = tl.arange(0, DV_BLOCK)[None, :]
    first = row * capacity + tl.zeros([1], tl.int64)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DV_BLOCK], tl.float32)
    for segment in range(tl.load(part_count + token)):
        at = first + segment
        part = tl.load(parts + at[:, None] * DV + dv, mask=dv < DV, other=0.0)
        top, total, acc = _fold(top, total, acc, tl.load(part_top + at), tl.load(part_sum + at), part)
    sink = top
    if HAS_SINKS:
        sink = tl.load(sinks + row % num_heads) + tl.zeros([1], tl.float32)
    result = attended(top, total, acc, sink, HAS_SINKS)
    tl.store(out + row * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)


class _Tiling(NamedTuple):
    """How a call is cut up, which changes no bit of the result."""

    rows: int  # of queries x heads in a program
    heads: int  # of one KV head's group in a program
    keys: int  # in a program's step
    programs: int  # among which the segments of a sequence are divided; 0: one for each block of queries


class TritonAttention(AttentionOps):
    """See `AttentionOps`."""

    def apply_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, axes: Tensor | None = None
    ) -> None:
        rotate(q, k, positions, cos_sin, axes)

    def store_kv(self, k: Tensor, v: Tensor, cache: KvCache, loc: Tensor) -> None:
        k_cache, v_cache, k_scale, v_scale = cache
        within = v_cache.data_ptr() == k_cache.data_ptr()  # values that lie in k's rows are written with these
        d, dv = k.shape[2], v.shape[2]
        _store_kv[(k.shape[0], 1 if within else 2)](
            k,
            v,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            loc,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            k.shape[1],
            D=d,
            DV=dv,
            D_BLOCK=triton.next_power_of_2(d),
            DV_BLOCK=triton.next_power_of_2(dv),
            CHECKED=d if within else 0,  # values that lie in keys are spoilt with them
            IN_CODES=k_scale is not None,
        )

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
        k_cache, v_cache, k_scale, v_scale = cache
        page_table, page_map, rows = paged.page_table, paged.page_map, paged.rows
        num_tokens, num_heads, d = q.shape
        num_seqs, num_kv_heads, dv = len(rows), k_cache.shape[1], v_cache.shape[2]
        group = num_heads // num_kv_heads
        latent = v_cache.data_ptr() == k_cache.data_ptr()
        segment = _segment(num_heads, dv, num_kv_heads * (d if latent else d + dv) * k_cache.itemsize)
        capacity = _capacity(paged, segment, 0 if ahead is not None else sliding_window)
        decodes, arch = num_tokens == num_seqs and paged.causal, chip_of(q.device).arch
        tiling = _tiling(decodes, group, num_kv_heads, (d, dv), q.dtype, arch)
        if 4 * num_tokens * num_heads * capacity * dv > _PART_BYTES:
            tiling = tiling._replace(programs=0)
        main = max(16, 1 << (d.bit_length() - 1))
        out = torch.empty(num_tokens, num_heads, dv, dtype=q.dtype, device=q.device)
        parts = _Parts.of(out, capacity) if tiling.programs else _Parts(out, out, out, out)
        chunks = triton.cdiv(group, tiling.heads)
        blocks = num_tokens // (tiling.rows // tiling.heads) + num_seqs
        _attend[(blocks, num_kv_heads * chunks, max(1, tiling.programs))](
            q,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            page_table,
            page_map,
            rows,
            paged.q_start,
            paged.seq_lens,
            ahead,
            sinks,
            *parts,
            capacity,
            num_seqs,
            scale,
            softcap,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            page_table.stride(0),
            num_heads,
            num_kv_heads,
            GROUP=group,
            HEADS=tiling.heads,
            CHUNKS=chunks,
            D=d,
            D_MAIN=main,
            D_TAIL=max(16, triton.next_power_of_2(d - main)) if d > main else 0,
            DV=dv,
            DV_BLOCK=max(16, triton.next_power_of_2(dv)),
            PAGE=paged.page_size,
            CAUSAL=paged.causal,
            HAS_AHEAD=ahead is not None,
            WINDOW=sliding_window,
            HAS_MAP=page_map is not None,
            HAS_SINKS=sinks is not None,
            HAS_CAP=softcap > 0,
            LATENT=latent and dv == main,
            IN_CODES=k_scale is not None,
            SEGMENT=segment,
            PROGRAMS=tiling.programs,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            num_warps=4,
            num_stages=2,
        )
        if tiling.programs:
            _combine[(num_tokens * num_heads,)](
                *parts,
                capacity,
                sinks,
                out,
                num_heads,
                DV=dv,
                DV_BLOCK=triton.next_power_of_2(dv),
                HAS_SINKS=sinks is not None,
                num_warps=1,
                num_stages=4,
            )
        return out


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, axes: Tensor | None = None, *, back: bool = False
) -> None:
    """Rotate in place, see `AttentionOps.apply_rope`; `back`: by the negative angles."""
    half = cos_sin.shape[1] // 2
    _apply_rope[(q.shape[0], 2 if k.shape[1] else 1)](
        q,
        k,
        positions,
        0 if axes is None else positions.stride(0),
        cos_sin,
        positions if axes is None else axes,
        q.stride(0),
        q.stride(1),
        q.shape[1],
        k.stride(0),
        k.stride(1),
        k.shape[1],
        HAS_AXES=axes is not None,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        Q_HEADS=triton.next_power_of_2(q.shape[1]),
        K_HEADS=triton.next_power_of_2(max(1, k.shape[1])),
        BACK=back,
    )


def _tiling(
    decodes: bool, group: int, num_kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype, arch: int
) -> _Tiling:
    # Of 128 KiB of shared memory, queries and two steps' keys and values take most; the sums of a segment and of all
    # before it are in registers.
    d, dv = sizes
    keys = 64 if d * dtype.itemsize <= 256 else 32 if d * dtype.itemsize <= 512 else 16
    if not decodes:
        # float32 has no matrix unit that keeps its bits: large tiles would only take long to compile.
        # Before sm_90 the sums of 64 rows leave no registers for opening codes: 456 bytes of a thread were in memory.
        # On an H100 64 rows had the bits of 16. Later units of 64 rows are others, compared on no GPU, and Triton
        # compiles them for no KV in codes: there prompts and decodes have the instruction of 16 rows.
        most = _EXTEND_ROWS if arch // 10 == 9 and dv <= 128 else _EXTEND_ROWS // 2
        rows = _DECODE_ROWS if d > 256 or dtype == torch.float32 else most
        return _Tiling(rows, min(group, rows), keys, 0)
    heads = min(group, _DECODE_ROWS)
    programs = num_kv_heads * triton.cdiv(group, heads)
    return _Tiling(_DECODE_ROWS, heads, keys, min(64, max(4, triton.next_power_of_2(_PROGRAMS // programs))))


def _segment(num_heads: int, dv: int, key_bytes: int) -> int:
    """Return the keys of a segment: by what a model is alone. Its sums take an eighth of its keys' bytes at most."""
    return max(_SEGMENT, triton.next_power_of_2(triton.cdiv(8 * 4 * num_heads * dv, key_bytes)))


def _capacity(paged: PagedKv, segment: int, window: int) -> int:
    """Return the most segments that a query's keys are in; `window` 0: any of the sequence."""
    most = triton.cdiv(paged.page_table.shape[1] * paged.page_size, segment)
    return max(1, min(most, triton.cdiv(window, segment) + 1) if window else most)


class _Parts(NamedTuple):
    """The sums of segments, float32: of values, the largest scores, of weights; and how many segments a token has."""

    values: Tensor  # [T, Hq, capacity, Dv]
    tops: Tensor  # [T, Hq, capacity]
    sums: Tensor  # [T, Hq, capacity]
    counts: Tensor  # [T] int32

    @staticmethod
    def of(out: Tensor, capacity: int) -> _Parts:
        num_tokens, num_heads, dv = out.shape
        values = out.new_empty(num_tokens, num_heads, capacity, dv, dtype=torch.float32)
        tops, sums = out.new_empty(2, num_tokens, num_heads, capacity, dtype=torch.float32)
        return _Parts(values, tops, sums, out.new_empty(num_tokens, dtype=torch.int32))
