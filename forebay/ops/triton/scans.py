"""Scans in chunks: Mamba-2's and the gated delta rule's, by matrix units (decision 68).

A chunk is the tokens at CHUNK positions of a sequence, of which the first is a multiple of CHUNK. A slot has the state
as it was when the open chunk began, and what the open chunk's tokens brought since. A step is three kernels:

1. `prepare_*`: what the tokens of each chunk are to each other, of all chunks at once.
2. `scan_*`: each program computes some columns of a state, and takes the chunks of its sequence in turn. The first has
   tokens of earlier steps, the last may stay open. So a decode is a chunk in which one token is new, and computes it as
   a prompt does.
3. `keep_recent`: what the open chunk's tokens brought goes to the slots.

Matrices of a chunk have the token that acts in the first dimension [j], and the one that sees it in the second [i].
Shape letters as in ops/reference/recurrence.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.ops.triton.common import dot32, owner, softplus
from forebay.ops.triton.launch import kernel


@triton.jit
def next_snapshot(snap, stop, snap_slots):
    """From `snap` on the first entry that has a slot, or `stop`."""
    while (snap < stop) & (tl.load(snap_slots + snap, mask=snap < stop, other=1) == 0):
        snap += 1
    return snap


@triton.jit
def _part(rows, slot, ROW: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Where a slot has the part that begins OFFSET bytes behind the beginning of its row."""
    return tl.multiple_of((rows.to(tl.int64) + slot * ROW + OFFSET).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _opened_at(positions, first, CHUNK: tl.constexpr):
    """Where in the packed batch the chunk of token `first` would begin, if its earlier tokens were in the step."""
    return first - tl.load(positions + first) % CHUNK


@triton.jit
def _chunk(q_start, q_stop, positions, block, num_seqs, CHUNK: tl.constexpr):
    """The sequence of the block-th chunk, its first and last new token, and where the chunk begins, or behind them."""
    seq = owner(q_start, num_seqs, block, CHUNK, 2)
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    begin = stop
    if first < stop:
        begin = _opened_at(positions, first, CHUNK) + (block - first // CHUNK - 2 * seq) * CHUNK
    return seq, first, stop, begin


@triton.jit
def _since(log_decay):
    """Logarithm of what is left of the state before the chunk behind each token. A decay that leaves nothing is cut
    where a float32 ends, so that it takes no digits from those behind it. NaN stays."""
    return tl.cumsum(tl.where(log_decay < -104.0, -104.0, log_decay), 0)


@triton.jit
def _event(snap, snap_stop, snap_ends, snap_slots, opened_at, stop, write_slot, CHUNK: tl.constexpr):
    """Where the chunk begins whose tokens come behind the next state that is due, and that state's slot: a snapshot's,
    or at last, behind all tokens, the sequence's own."""
    some = snap < snap_stop
    end = tl.load(snap_ends + snap, mask=some, other=0).to(tl.int64)
    begin = opened_at + (end - opened_at) // CHUNK * CHUNK
    to = tl.load(snap_slots + snap, mask=some, other=0).to(tl.int64)
    return tl.where(some, begin, stop), tl.where(some, to, write_slot)


@kernel
@triton.jit(do_not_specialize=["num_seqs"])
def prepare_mamba2(
    dt,
    a,
    b,
    c,
    dt_bias,
    rows,
    shares,
    edges,
    slots,
    q_start,
    q_stop,
    positions,
    num_seqs,
    dt_token,
    b_token,
    c_token,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    B_AT: tl.constexpr,
    DT_AT: tl.constexpr,
    CHUNK: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Compute the matrices and factors of each chunk.

    shares [C, HEADS, CHUNK, CHUNK]: the factor of a token's x in the y of another.
    edges [C, HEADS, 2, CHUNK]: factors of the state behind each token, and of x in the state behind the chunk.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq, first, stop, begin = _chunk(q_start, q_stop, positions, block, num_seqs, CHUNK)
    if begin < stop:
        dtype: tl.constexpr = b.dtype.element_ty
        slot = tl.load(slots + seq).to(tl.int64)
        n, r = tl.arange(0, D_BLOCK), tl.arange(0, CHUNK)
        token = begin + r
        taken, new = token < stop, (token >= first) & (token < stop)
        group = head // (HEADS // GROUPS)
        b_kept = _part(rows, slot, ROW, B_AT, dtype) + r * (GROUPS * D)
        b_rows = tl.where(new, b + token * b_token, b_kept) + group * D
        c_rows = c + token * c_token + group * D
        dt_kept = _part(rows, slot, ROW, DT_AT, dtype) + r * HEADS
        dt_rows = tl.where(new, dt + token * dt_token, dt_kept) + head
        live = (n < D)[None, :]
        bs = tl.load(b_rows[:, None] + n[None, :], mask=taken[:, None] & live, other=0.0)
        cs = tl.load(c_rows[:, None] + n[None, :], mask=new[:, None] & live, other=0.0)
        raw = tl.load(dt_rows, mask=taken, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
        step = softplus(raw)
        step = tl.where(step < dt_min, dt_min, tl.where(step > dt_max, dt_max, step))  # NaN stays
        step = tl.where(taken, step, 0.0)
        since = _since(step * tl.load(a + head))
        at_end = tl.sum(tl.where(r == CHUNK - 1, since, 0.0), 0)
        seen = r[:, None] <= r[None, :]
        left = tl.exp(tl.where(seen, since[None, :] - since[:, None], 0.0)) * step[:, None]
        pairs = tl.where(seen, dot32(bs, tl.trans(cs), dtype == tl.float32) * left, 0.0)
        at = block * HEADS + head
        tl.store(shares + at * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :], pairs)
        tl.store(edges + at * (2 * CHUNK) + r, tl.exp(since))
        tl.store(edges + at * (2 * CHUNK) + CHUNK + r, step * tl.exp(at_end - since))


@kernel
@triton.jit
def scan_mamba2(
    x,
    b,
    c,
    d,
    shares,
    edges,
    rows,
    out,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    positions,
    x_token,
    b_token,
    c_token,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    X_AT: tl.constexpr,
    B_AT: tl.constexpr,
    CHUNK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Take the chunks of a sequence in turn: y of new tokens, and states where they are due."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    if first >= stop:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    kept: tl.constexpr = rows.dtype.element_ty
    WHOLE: tl.constexpr = dtype == tl.float32
    slot, write_slot = tl.load(slots + seq).to(tl.int64), tl.load(write_slots + seq).to(tl.int64)
    p, n, r = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK), tl.arange(0, D_BLOCK), tl.arange(0, CHUNK)
    live_p, live_n = (p < P)[:, None], (n < D)[None, :]
    place = head * (D * P) + n[None, :] * P + p[:, None]
    h = tl.load(_part(rows, slot, ROW, 0, kept) + place, mask=live_p & live_n, other=0.0).to(tl.float32)
    skip = tl.load(d + head)
    group = head // (HEADS // GROUPS)
    x_kept = _part(rows, slot, ROW, X_AT, dtype) + r * (HEADS * P) + head * P
    b_kept = _part(rows, slot, ROW, B_AT, dtype) + r * (GROUPS * D) + group * D
    opened_at = _opened_at(positions, first, CHUNK)
    snap_stop = tl.load(snap_start + seq + 1)
    snap = next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
    at = (first // CHUNK + 2 * seq) * HEADS + head
    come = opened_at
    while snap <= snap_stop:
        until, to = _event(snap, snap_stop, snap_ends, snap_slots, opened_at, stop, write_slot, CHUNK)
        for begin in range(come, until, CHUNK):
            token = begin + r
            taken, new = token < stop, (token >= first) & (token < stop)
            x_rows = tl.where(new, x + token * x_token + head * P, x_kept)
            b_rows = tl.where(new, b + token * b_token + group * D, b_kept)
            c_rows = c + token * c_token + group * D
            xs = tl.load(x_rows[None, :] + p[:, None], mask=live_p & taken[None, :], other=0.0)
            bs = tl.load(b_rows[:, None] + n[None, :], mask=taken[:, None] & live_n, other=0.0)
            cs = tl.load(c_rows[:, None] + n[None, :], mask=new[:, None] & live_n, other=0.0)
            pairs = tl.load(shares + at * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :])
            left = tl.load(edges + at * (2 * CHUNK) + r)
            into_state = tl.load(edges + at * (2 * CHUNK) + CHUNK + r)
            all_left = tl.load(edges + at * (2 * CHUNK) + CHUNK - 1)
            at += HEADS
            xs32 = xs.to(tl.float32)
            y = tl.fma(dot32(h, tl.trans(cs), WHOLE), left[None, :], dot32(xs, pairs, WHOLE))
            y = tl.fma(skip, xs32, y)
            tl.store(out + (token * HEADS + head)[None, :] * P + p[:, None], y.to(dtype), mask=live_p & new[None, :])
            after = tl.fma(h, all_left, dot32(xs32 * into_state[None, :], bs, WHOLE))
            h = tl.where(begin + CHUNK <= stop, after.to(kept).to(tl.float32), h)
        changed = (to != slot) | (opened_at + CHUNK <= stop)
        tl.store(_part(rows, to, ROW, 0, kept) + place, h.to(kept), mask=live_p & live_n & (to > 0) & changed)
        come = tl.maximum(come, until)
        snap = next_snapshot(snap + 1, snap_stop, snap_slots)


@kernel
@triton.jit(do_not_specialize=["num_seqs"])
def prepare_delta(
    q,
    k,
    log_decay,
    beta,
    rows,
    solved,
    shares,
    edges,
    slots,
    q_start,
    q_stop,
    positions,
    num_seqs,
    scale,
    q_token,
    k_token,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    ROW: tl.constexpr,
    DECAY_AT: tl.constexpr,
    BETA_AT: tl.constexpr,
    K_AT: tl.constexpr,
    CHUNK: tl.constexpr,
    DK_BLOCK: tl.constexpr,
):
    """Compute the matrices and factors of each chunk.

    solved [C, HEADS, CHUNK, CHUNK]: the factor of a token's new value in what another token writes.
    shares, likewise: the factor of what a token wrote in the y of another.
    edges [C, HEADS, 4, CHUNK]: factors of keys and of queries that meet the state before the chunk, of keys in the
    state behind it, and of the state behind each token. With decays by channel there are two: the scales of keys and of
    queries.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq, first, stop, begin = _chunk(q_start, q_stop, positions, block, num_seqs, CHUNK)
    if begin < stop:
        dtype: tl.constexpr = k.dtype.element_ty
        WHOLE: tl.constexpr = dtype == tl.float32
        slot = tl.load(slots + seq).to(tl.int64)
        i, r = tl.arange(0, DK_BLOCK), tl.arange(0, CHUNK)
        token = begin + r
        taken, new = token < stop, (token >= first) & (token < stop)
        key_head = head // (HEADS // KEY_HEADS)
        k_kept = _part(rows, slot, ROW, K_AT, dtype) + r * (KEY_HEADS * DK)
        k_rows = tl.where(new, k + token * k_token, k_kept) + key_head * DK
        q_rows = q + token * q_token + key_head * DK
        DECAYS: tl.constexpr = DK if PER_CHANNEL else 1
        decay_kept = _part(rows, slot, ROW, DECAY_AT, tl.float32) + r * (HEADS * DECAYS)
        decay_rows = tl.where(new, log_decay + token * (HEADS * DECAYS), decay_kept) + head * DECAYS
        beta_rows = tl.where(new, beta + token * HEADS, _part(rows, slot, ROW, BETA_AT, tl.float32) + r * HEADS) + head
        live = (i < DK)[None, :]
        keys = tl.load(k_rows[:, None] + i[None, :], mask=taken[:, None] & live, other=0.0)
        queries = tl.load(q_rows[:, None] + i[None, :], mask=new[:, None] & live, other=0.0)
        share = tl.load(beta_rows, mask=taken, other=0.0)
        keys32, queries32 = keys.to(tl.float32), queries.to(tl.float32)
        key_scale = 1.0 / tl.sqrt(tl.sum(keys32 * keys32, 1) + 1e-6)
        query_scale = scale / tl.sqrt(tl.sum(queries32 * queries32, 1) + 1e-6)
        seen, before = r[:, None] <= r[None, :], r[:, None] < r[None, :]
        at = block * HEADS + head
        edges_at = edges + at * (4 * CHUNK) + r
        if PER_CHANNEL:
            decay = tl.load(decay_rows[:, None] + i[None, :], mask=taken[:, None] & live, other=0.0)
            since = _since(decay)
            by_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
            by_queries = tl.zeros([CHUNK, CHUNK], tl.float32)
            # A column of both for each token [i]: how near keys are to it depends on the decays of each channel.
            for t in range(tl.minimum(stop - begin, CHUNK).to(tl.int32)):
                row = (r == t)[:, None]
                now = tl.sum(tl.where(row, since, 0.0), 0)[None, :]
                near = keys32 * tl.exp(tl.where((r <= t)[:, None], now - since, 0.0))
                to_key = tl.sum(near * tl.sum(tl.where(row, keys32, 0.0), 0)[None, :], 1)
                to_query = tl.sum(near * tl.sum(tl.where(row, queries32, 0.0), 0)[None, :], 1)
                here = (r == t)[None, :]
                by_keys = tl.where(here, to_key[:, None], by_keys)
                by_queries = tl.where(here, to_query[:, None], by_queries)
            tl.store(edges_at, key_scale)
            tl.store(edges_at + CHUNK, query_scale)
        else:
            since = _since(tl.load(decay_rows, mask=taken, other=0.0))
            at_end = tl.sum(tl.where(r == CHUNK - 1, since, 0.0), 0)
            left = tl.exp(tl.where(seen, since[None, :] - since[:, None], 0.0))
            by_keys = dot32(keys, tl.trans(keys), WHOLE) * left
            by_queries = dot32(keys, tl.trans(queries), WHOLE) * left
            tl.store(edges_at, key_scale * tl.exp(since))
            tl.store(edges_at + CHUNK, query_scale * tl.exp(since))
            tl.store(edges_at + 2 * CHUNK, key_scale * tl.exp(at_end - since))
            tl.store(edges_at + 3 * CHUNK, tl.exp(since))
        by_keys = tl.where(before, by_keys * key_scale[:, None] * (key_scale * share)[None, :], 0.0)
        by_queries = tl.where(seen, by_queries * key_scale[:, None] * query_scale[None, :], 0.0)
        # Row i of the inverse of 1 + by_keys transposed, from those above: each token writes without what those before
        # it wrote.
        inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
        for t in range(1, tl.minimum(stop - begin, CHUNK).to(tl.int32)):
            of_token = tl.sum(tl.where((r == t)[None, :], by_keys, 0.0), 1)
            row = tl.sum(of_token[:, None] * inverse, 0)
            inverse = tl.where((r == t)[:, None], inverse - row[None, :], inverse)
        pairs = at * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]
        tl.store(shares + pairs, by_queries)
        transposed = at * (CHUNK * CHUNK) + r[None, :] * CHUNK + r[:, None]
        tl.store(solved + transposed, inverse * share[None, :])


@kernel
@triton.jit
def scan_delta(
    q,
    k,
    v,
    log_decay,
    solved,
    shares,
    edges,
    rows,
    out,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    positions,
    q_token,
    k_token,
    v_token,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    ROW: tl.constexpr,
    DECAY_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    CHUNK: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Take the chunks of a sequence in turn: outputs of new tokens, and states where they are due."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    if first >= stop:
        return
    dtype: tl.constexpr = k.dtype.element_ty
    kept: tl.constexpr = rows.dtype.element_ty
    WHOLE: tl.constexpr = dtype == tl.float32
    slot, write_slot = tl.load(slots + seq).to(tl.int64), tl.load(write_slots + seq).to(tl.int64)
    i, j, r = tl.arange(0, DK_BLOCK), tl.program_id(2) * DV_BLOCK + tl.arange(0, DV_BLOCK), tl.arange(0, CHUNK)
    live_j, live_i = (j < DV)[:, None], (i < DK)[None, :]
    place = head * (DK * DV) + i[None, :] * DV + j[:, None]
    h = tl.load(_part(rows, slot, ROW, 0, kept) + place, mask=live_j & live_i, other=0.0).to(tl.float32)
    key_head = head // (HEADS // KEY_HEADS)
    k_kept = _part(rows, slot, ROW, K_AT, dtype) + r * (KEY_HEADS * DK) + key_head * DK
    v_kept = _part(rows, slot, ROW, V_AT, dtype) + r * (HEADS * DV) + head * DV
    decay_kept = _part(rows, slot, ROW, DECAY_AT, tl.float32) + r * (HEADS * DK) + head * DK
    opened_at = _opened_at(positions, first, CHUNK)
    snap_stop = tl.load(snap_start + seq + 1)
    snap = next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
    at = (first // CHUNK + 2 * seq) * HEADS + head
    come = opened_at
    while snap <= snap_stop:
        until, to = _event(snap, snap_stop, snap_ends, snap_slots, opened_at, stop, write_slot, CHUNK)
        for begin in range(come, until, CHUNK):
            token = begin + r
            taken, new = token < stop, (token >= first) & (token < stop)
            k_rows = tl.where(new, k + token * k_token + key_head * DK, k_kept)
            v_rows = tl.where(new, v + token * v_token + head * DV, v_kept)
            q_rows = q + token * q_token + key_head * DK
            keys = tl.load(k_rows[:, None] + i[None, :], mask=taken[:, None] & live_i, other=0.0)
            queries = tl.load(q_rows[:, None] + i[None, :], mask=new[:, None] & live_i, other=0.0)
            values = tl.load(v_rows[None, :] + j[:, None], mask=live_j & taken[None, :], other=0.0).to(tl.float32)
            pairs = at * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :]
            writes, reads = tl.load(solved + pairs), tl.load(shares + pairs)
            edges_at = edges + at * (4 * CHUNK) + r
            of_key, of_query = tl.load(edges_at), tl.load(edges_at + CHUNK)
            if PER_CHANNEL:
                decay_rows = tl.where(new, log_decay + token * (HEADS * DK) + head * DK, decay_kept)
                decay = tl.load(decay_rows[:, None] + i[None, :], mask=taken[:, None] & live_i, other=0.0)
                since = _since(decay)
                at_end = tl.sum(tl.where((r == CHUNK - 1)[:, None], since, 0.0), 0)[None, :]
                keys32 = keys.to(tl.float32) * of_key[:, None]
                queries32 = queries.to(tl.float32) * of_query[:, None]
                new_values = values - dot32(h, tl.trans(keys32 * tl.exp(since)), WHOLE)
                y = dot32(h, tl.trans(queries32 * tl.exp(since)), WHOLE)
            else:
                new_values = tl.fma(-dot32(h, tl.trans(keys), WHOLE), of_key[None, :], values)
                y = dot32(h, tl.trans(queries), WHOLE) * of_query[None, :]
            written = dot32(new_values, writes, WHOLE)
            y += dot32(written, reads, WHOLE)
            out_at = out + (token * HEADS + head)[None, :] * DV + j[:, None]
            tl.store(out_at, y.to(out.dtype.element_ty), mask=live_j & new[None, :])
            if PER_CHANNEL:
                added = dot32(written, keys32 * tl.exp(at_end - since), WHOLE)
                after = tl.fma(h, tl.exp(at_end), added)
            else:
                into_state = tl.load(edges_at + 2 * CHUNK)
                all_left = tl.load(edges + at * (4 * CHUNK) + 4 * CHUNK - 1)
                after = tl.fma(h, all_left, dot32(written * into_state[None, :], keys, WHOLE))
            h = tl.where(begin + CHUNK <= stop, after.to(kept).to(tl.float32), h)
            at += HEADS
        changed = (to != slot) | (opened_at + CHUNK <= stop)
        tl.store(_part(rows, to, ROW, 0, kept) + place, h.to(kept), mask=live_j & live_i & (to > 0) & changed)
        come = tl.maximum(come, until)
        snap = next_snapshot(snap + 1, snap_stop, snap_slots)


@triton.jit
def _keep_until(x, x_token, rows, slot, to, at, opened_at, first, end, ROW, PART, COLUMNS, CHUNK: tl.constexpr):
    """To slot `to` what the tokens before `end` of the chunk that begins at `opened_at` brought."""
    dtype: tl.constexpr = x.dtype.element_ty
    token = opened_at + tl.arange(0, CHUNK)
    place = tl.arange(0, CHUNK)[:, None] * COLUMNS + at[None, :]
    new = token >= first
    inputs = tl.where(new, x + token * x_token, _part(rows, slot, ROW, PART, dtype) + tl.arange(0, CHUNK) * COLUMNS)
    # Those that its own slot has are there.
    wanted = (token < end) & (new | (to != slot)) & (to > 0)
    mask = wanted[:, None] & (at < COLUMNS)[None, :]
    values = tl.load(inputs[:, None] + at[None, :], mask=mask, other=0.0)
    tl.store(_part(rows, to, ROW, PART, dtype) + place, values, mask=mask)


@triton.jit
def _keep_columns(
    x,
    x_token,
    block,
    rows,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    positions,
    ROW: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    if first < stop:
        at = block * BLOCK + tl.arange(0, BLOCK)
        opened_at = _opened_at(positions, first, CHUNK)
        slot = tl.load(slots + seq).to(tl.int64)
        for snap in range(tl.load(snap_start + seq), tl.load(snap_start + seq + 1)):
            to = tl.load(snap_slots + snap).to(tl.int64)
            end = tl.load(snap_ends + snap).to(tl.int64)  # without a slot it means nothing
            begin = opened_at + (end - opened_at) // CHUNK * CHUNK
            _keep_until(x, x_token, rows, slot, to, at, begin, first, end, ROW, PART, COLUMNS, CHUNK)
        to = tl.load(write_slots + seq).to(tl.int64)
        begin = opened_at + (stop - opened_at) // CHUNK * CHUNK
        _keep_until(x, x_token, rows, slot, to, at, begin, first, stop, ROW, PART, COLUMNS, CHUNK)


@kernel
@triton.jit
def keep_recent(
    x,
    y,
    z,
    u,
    rows,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    positions,
    x_token,
    y_token,
    z_token,
    u_token,
    ROW: tl.constexpr,
    X_AT: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    Y_AT: tl.constexpr,
    Y_COLUMNS: tl.constexpr,
    Z_AT: tl.constexpr,
    Z_COLUMNS: tl.constexpr,
    U_AT: tl.constexpr,
    U_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write to the slots of states and snapshots what their open chunks have of up to four inputs."""
    X_BLOCKS: tl.constexpr = (X_COLUMNS + BLOCK - 1) // BLOCK
    Y_BLOCKS: tl.constexpr = X_BLOCKS + (Y_COLUMNS + BLOCK - 1) // BLOCK
    Z_BLOCKS: tl.constexpr = Y_BLOCKS + (Z_COLUMNS + BLOCK - 1) // BLOCK
    block = tl.program_id(1)
    if block < X_BLOCKS:
        _keep_columns(
            x, x_token, block, rows, slots, write_slots, q_start, q_stop, snap_start, snap_ends, snap_slots, positions,
            ROW, X_AT, X_COLUMNS, CHUNK, BLOCK,
        )  # fmt: skip
    elif block < Y_BLOCKS:
        _keep_columns(
            y, y_token, block - X_BLOCKS, rows, slots, write_slots, q_start, q_stop, snap_start, snap_ends, snap_slots,
            positions, ROW, Y_AT, Y_COLUMNS, CHUNK, BLOCK,
        )  # fmt: skip
    elif block < Z_BLOCKS:
        _keep_columns(
            z, z_token, block - Y_BLOCKS, rows, slots, write_slots, q_start, q_stop, snap_start, snap_ends, snap_slots,
            positions, ROW, Z_AT, Z_COLUMNS, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        _keep_columns(
            u, u_token, block - Z_BLOCKS, rows, slots, write_slots, q_start, q_stop, snap_start, snap_ends, snap_slots,
            positions, ROW, U_AT, U_COLUMNS, CHUNK, BLOCK,
        )  # fmt: skip
