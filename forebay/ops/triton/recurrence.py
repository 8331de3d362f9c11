"""Convolutions, and the recurrences that have no parallel form whose results would not depend on how a prompt was cut.

A scan is one program per sequence, head and part of its state. It takes the sequence's tokens in turn, with its part of
the state in registers, and loads the next token's inputs meanwhile. A part is as large for a prompt as for a decode:
its sums have one order in both. Shape letters as in ops/reference/recurrence.py.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.recurrence import Convolution, RecurrenceOps, Scan, StateBatch
from forebay.ops.triton.common import owner, softplus
from forebay.ops.triton.launch import kernel

_CHANNELS: Final = 256  # of a convolution, in one program
_SCAN_COLUMNS: Final = 32  # of a state, in one program: a row of them in float32 is a line of memory
_SCAN_ELEMENTS: Final = 2048  # of a state of Mamba 1, in one program: its rows are short


@triton.jit
def _next_snapshot(snap, stop, snap_slots):
    """From `snap` on the first entry that has a slot, or `stop`."""
    while (snap < stop) & (tl.load(snap_slots + snap, mask=snap < stop, other=1) == 0):
        snap += 1
    return snap


@kernel
@triton.jit(do_not_specialize=["num_seqs"])
def _convolve(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    q_start,
    q_stop,
    num_seqs,
    x_stride,
    channels,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    # Blocks of one entry: of sequences without tokens, some programs' only work is to find that they have none.
    seq = owner(q_start, num_seqs, token, 1)
    first = tl.load(q_start + seq)
    t = token - seq
    if t >= tl.load(q_stop + seq):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < channels
    last = state + tl.load(slots + seq).to(tl.int64) * (TAPS - 1) * channels
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        source = t - (TAPS - 1) + j
        inside = source >= first
        values = tl.load(x + source.to(tl.int64) * x_stride + at, mask=live & inside, other=0.0)
        earlier = tl.load(last + (source - first + TAPS - 1) * channels + at, mask=live & (source < first), other=0.0)
        values = tl.where(inside, values, earlier)
        acc += values.to(tl.float32) * tl.load(weight + j * channels + at, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
    if SILU:
        acc *= tl.sigmoid(acc)
    tl.store(out + t.to(tl.int64) * channels + at, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def _last_inputs(x, last, to, first, stop, x_stride, channels, at, live, TAPS: tl.constexpr):
    """The TAPS - 1 inputs before `stop` to `to`, the oldest first: each is read before its place is written."""
    for j in tl.static_range(TAPS - 1):
        source = stop - (TAPS - 1) + j
        inside = source >= first
        values = tl.load(x + source.to(tl.int64) * x_stride + at, mask=live & inside, other=0.0)
        earlier = tl.load(last + (source - first + TAPS - 1) * channels + at, mask=live & (source < first), other=0.0)
        tl.store(to + j * channels + at, tl.where(inside, values, earlier), mask=live)


@kernel
@triton.jit
def _keep_inputs(
    x,
    state,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < channels
    first = tl.load(q_start + seq)
    stop = tl.load(q_stop + seq)
    size = (TAPS - 1) * channels
    last = state + tl.load(slots + seq).to(tl.int64) * size
    for snap in range(tl.load(snap_start + seq), tl.load(snap_start + seq + 1)):
        snap_slot = tl.load(snap_slots + snap).to(tl.int64)
        end = tl.load(snap_ends + snap)  # without a slot it means nothing
        kept = live & (snap_slot > 0)
        _last_inputs(x, last, state + snap_slot * size, first, end, x_stride, channels, at, kept, TAPS)
    to = tl.load(write_slots + seq).to(tl.int64)
    kept = live & (to > 0) & (stop > first)
    _last_inputs(x, last, state + to * size, first, stop, x_stride, channels, at, kept, TAPS)


@kernel
@triton.jit
def _mamba2(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    state,
    out,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    x_token,
    x_head,
    dt_token,
    b_token,
    b_group,
    c_token,
    c_group,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    P_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    n = tl.arange(0, D_BLOCK)
    live_p, live_n = p < P, n < D
    live = live_n[:, None] & live_p[None, :]
    place = n[:, None] * P + p[None, :]
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    slot, write_slot = tl.load(slots + seq).to(tl.int64), tl.load(write_slots + seq).to(tl.int64)
    h = tl.load(state + (slot * HEADS + head) * (D * P) + place, mask=live, other=0.0).to(tl.float32)
    rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    group = head // PER_GROUP
    snap_stop = tl.load(snap_start + seq + 1)
    snap = _next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
    dt_at, x_at, b_at, c_at = dt + head, x + head * x_head + p, b + group * b_group + n, c + group * c_group + n
    some = stop > first
    next_dt = tl.load(dt_at + first * dt_token, mask=some, other=0.0)
    next_x = tl.load(x_at + first * x_token, mask=live_p & some, other=0.0)
    next_b = tl.load(b_at + first * b_token, mask=live_n & some, other=0.0)
    next_c = tl.load(c_at + first * c_token, mask=live_n & some, other=0.0)
    for token in range(first, stop):
        raw, xs, bs, cs = next_dt.to(tl.float32), next_x.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32)
        some = token + 1 < stop
        next_dt = tl.load(dt_at + (token + 1) * dt_token, mask=some, other=0.0)
        next_x = tl.load(x_at + (token + 1) * x_token, mask=live_p & some, other=0.0)
        next_b = tl.load(b_at + (token + 1) * b_token, mask=live_n & some, other=0.0)
        next_c = tl.load(c_at + (token + 1) * c_token, mask=live_n & some, other=0.0)
        step = tl.minimum(tl.maximum(softplus(raw + bias), dt_min), dt_max)
        h = h * tl.exp(step * rate) + bs[:, None] * (step * xs)[None, :]
        y = tl.sum(cs[:, None] * h, 0) + skip * xs
        tl.store(out + (token * HEADS + head) * P + p, y.to(out.dtype.element_ty), mask=live_p)
        rounded = h.to(state.dtype.element_ty)
        h = rounded.to(tl.float32)
        due = (snap < snap_stop) & (tl.load(snap_ends + snap, mask=snap < snap_stop, other=-1) == token + 1)
        to = tl.load(snap_slots + snap, mask=due, other=0).to(tl.int64)
        tl.store(state + (to * HEADS + head) * (D * P) + place, rounded, mask=live & due)
        snap = _next_snapshot(snap + due.to(tl.int32), snap_stop, snap_slots)
    mine = state + (write_slot * HEADS + head) * (D * P)
    tl.store(mine + place, h.to(state.dtype.element_ty), mask=live & (write_slot > 0) & (stop > first))


@kernel
@triton.jit
def _mamba1(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    state,
    out,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    x_token,
    dt_token,
    b_token,
    c_token,
    channels,
    D: tl.constexpr,
    I_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    i = tl.program_id(1) * I_BLOCK + tl.arange(0, I_BLOCK)
    n = tl.arange(0, D_BLOCK)
    live_i, live_n = i < channels, n < D
    live = live_i[:, None] & live_n[None, :]
    place = i[:, None] * D + n[None, :]
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    slot, write_slot = tl.load(slots + seq).to(tl.int64), tl.load(write_slots + seq).to(tl.int64)
    h = tl.load(state + slot * channels * D + place, mask=live, other=0.0).to(tl.float32)
    rate = tl.load(a + place, mask=live, other=0.0)
    skip = tl.load(d + i, mask=live_i, other=0.0)
    bias = tl.load(dt_bias + i, mask=live_i, other=0.0)
    snap_stop = tl.load(snap_start + seq + 1)
    snap = _next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
    some = stop > first
    next_dt = tl.load(dt + first * dt_token + i, mask=live_i & some, other=0.0)
    next_x = tl.load(x + first * x_token + i, mask=live_i & some, other=0.0)
    next_b = tl.load(b + first * b_token + n, mask=live_n & some, other=0.0)
    next_c = tl.load(c + first * c_token + n, mask=live_n & some, other=0.0)
    for token in range(first, stop):
        raw, xs, bs, cs = next_dt.to(tl.float32), next_x.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32)
        some = token + 1 < stop
        next_dt = tl.load(dt + (token + 1) * dt_token + i, mask=live_i & some, other=0.0)
        next_x = tl.load(x + (token + 1) * x_token + i, mask=live_i & some, other=0.0)
        next_b = tl.load(b + (token + 1) * b_token + n, mask=live_n & some, other=0.0)
        next_c = tl.load(c + (token + 1) * c_token + n, mask=live_n & some, other=0.0)
        step = softplus(raw + bias)
        h = h * tl.exp(step[:, None] * rate) + (step * xs)[:, None] * bs[None, :]
        y = tl.sum(h * cs[None, :], 1) + skip * xs
        tl.store(out + token * channels + i, y.to(out.dtype.element_ty), mask=live_i)
        rounded = h.to(state.dtype.element_ty)
        h = rounded.to(tl.float32)
        due = (snap < snap_stop) & (tl.load(snap_ends + snap, mask=snap < snap_stop, other=-1) == token + 1)
        to = tl.load(snap_slots + snap, mask=due, other=0).to(tl.int64)
        tl.store(state + to * channels * D + place, rounded, mask=live & due)
        snap = _next_snapshot(snap + due.to(tl.int32), snap_stop, snap_slots)
    mine = state + write_slot * channels * D
    tl.store(mine + place, h.to(state.dtype.element_ty), mask=live & (write_slot > 0) & (stop > first))


@kernel
@triton.jit
def _delta_rule(
    q,
    k,
    v,
    log_decay,
    beta,
    state,
    out,
    slots,
    write_slots,
    q_start,
    q_stop,
    snap_start,
    snap_ends,
    snap_slots,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    PER_KEY_HEAD: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, DK_BLOCK)
    j = tl.program_id(2) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    live_i, live_j = i < DK, j < DV
    live = live_i[:, None] & live_j[None, :]
    place = i[:, None] * DV + j[None, :]
    first = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_stop + seq).to(tl.int64)
    slot, write_slot = tl.load(slots + seq).to(tl.int64), tl.load(write_slots + seq).to(tl.int64)
    h = tl.load(state + (slot * HEADS + head) * (DK * DV) + place, mask=live, other=0.0).to(tl.float32)
    key_head = head // PER_KEY_HEAD
    snap_stop = tl.load(snap_start + seq + 1)
    snap = _next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
    q_at, k_at, v_at = q + key_head * q_head + i, k + key_head * k_head + i, v + head * v_head + j
    # A decay for each key channel, or one.
    some = stop > first
    decay_token: tl.constexpr = HEADS * DK if PER_CHANNEL else HEADS
    decay_at = log_decay + (head * DK + i if PER_CHANNEL else head)
    live_decay = live_i if PER_CHANNEL else some | True
    next_q = tl.load(q_at + first * q_token, mask=live_i & some, other=0.0)
    next_k = tl.load(k_at + first * k_token, mask=live_i & some, other=0.0)
    next_v = tl.load(v_at + first * v_token, mask=live_j & some, other=0.0)
    next_decay = tl.load(decay_at + first * decay_token, mask=live_decay & some, other=0.0)
    next_beta = tl.load(beta + first * HEADS + head, mask=some, other=0.0)
    for token in range(first, stop):
        query, key, value = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        decay, share = next_decay, next_beta
        some = token + 1 < stop
        next_q = tl.load(q_at + (token + 1) * q_token, mask=live_i & some, other=0.0)
        next_k = tl.load(k_at + (token + 1) * k_token, mask=live_i & some, other=0.0)
        next_v = tl.load(v_at + (token + 1) * v_token, mask=live_j & some, other=0.0)
        next_decay = tl.load(decay_at + (token + 1) * decay_token, mask=live_decay & some, other=0.0)
        next_beta = tl.load(beta + (token + 1) * HEADS + head, mask=some, other=0.0)
        query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        at = token * HEADS + head
        h *= tl.exp(decay)[:, None] if PER_CHANNEL else tl.exp(decay)
        written = share * (value - tl.sum(key[:, None] * h, 0))
        h += key[:, None] * written[None, :]
        y = tl.sum((query * scale)[:, None] * h, 0)
        tl.store(out + at * DV + j, y.to(out.dtype.element_ty), mask=live_j)
        rounded = h.to(state.dtype.element_ty)
        h = rounded.to(tl.float32)
        due = (snap < snap_stop) & (tl.load(snap_ends + snap, mask=snap < snap_stop, other=-1) == token + 1)
        to = tl.load(snap_slots + snap, mask=due, other=0).to(tl.int64)
        tl.store(state + (to * HEADS + head) * (DK * DV) + place, rounded, mask=live & due)
        snap = _next_snapshot(snap + due.to(tl.int32), snap_stop, snap_slots)
    mine = state + (write_slot * HEADS + head) * (DK * DV)
    tl.store(mine + place, h.to(state.dtype.element_ty), mask=live & (write_slot > 0) & (stop > first))


class TritonRecurrence(RecurrenceOps):
    """See `RecurrenceOps`."""

    def causal_conv(self, x: Tensor, conv: Convolution, state: Tensor, batch: StateBatch) -> Tensor:
        tokens, channels = x.shape
        num_seqs, taps = len(batch.slots), conv.weight.shape[0]
        out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(channels, _CHANNELS)
        _convolve[(tokens + num_seqs if tokens else 0, blocks)](
            x,
            conv.weight,
            conv.bias,
            state,
            out,
            batch.slots,
            batch.q_start,
            batch.q_stop,
            num_seqs,
            x.stride(0),
            channels,
            HAS_BIAS=conv.bias is not None,
            SILU=conv.silu,
            TAPS=taps,
            BLOCK=_CHANNELS,
        )
        _keep_inputs[(num_seqs if tokens else 0, blocks)](
            x, state, *_tensors(batch), x.stride(0), channels, TAPS=taps, BLOCK=_CHANNELS
        )
        return out

    def mamba2_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, heads, p = x.shape
        state_size = state.shape[2]
        out = torch.empty(tokens, heads, p, dtype=x.dtype, device=x.device)
        n_block = triton.next_power_of_2(state_size)
        p_block = min(triton.next_power_of_2(p), _SCAN_COLUMNS)
        _mamba2[(len(batch.slots) if tokens else 0, heads, triton.cdiv(p, p_block))](
            x,
            dt,
            scan.a,
            b,
            c,
            scan.d,
            scan.dt_bias,
            state,
            out,
            *_tensors(batch),
            x.stride(0),
            x.stride(1),
            dt.stride(0),
            b.stride(0),
            b.stride(1),
            c.stride(0),
            c.stride(1),
            *scan.dt_limit,
            HEADS=heads,
            PER_GROUP=heads // b.shape[1],
            P=p,
            D=state_size,
            P_BLOCK=p_block,
            D_BLOCK=n_block,
        )
        return out

    def mamba1_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, channels = x.shape
        state_size = scan.a.shape[1]
        out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        n_block = triton.next_power_of_2(state_size)
        i_block = min(triton.next_power_of_2(channels), max(1, _SCAN_ELEMENTS // n_block))
        _mamba1[(len(batch.slots) if tokens else 0, triton.cdiv(channels, i_block))](
            x,
            dt,
            scan.a,
            b,
            c,
            scan.d,
            scan.dt_bias,
            state,
            out,
            *_tensors(batch),
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            channels,
            D=state_size,
            I_BLOCK=i_block,
            D_BLOCK=n_block,
        )
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, heads, dv = v.shape
        dk = q.shape[2]
        out = torch.empty(tokens, heads, dv, dtype=v.dtype, device=v.device)
        k_block = triton.next_power_of_2(dk)
        v_block = min(triton.next_power_of_2(dv), _SCAN_COLUMNS)
        _delta_rule[(len(batch.slots) if tokens else 0, heads, triton.cdiv(dv, v_block))](
            q,
            k,
            v,
            log_decay,
            beta,
            state,
            out,
            *_tensors(batch),
            dk**-0.5,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            HEADS=heads,
            PER_KEY_HEAD=heads // q.shape[1],
            DK=dk,
            DV=dv,
            DK_BLOCK=k_block,
            DV_BLOCK=v_block,
            PER_CHANNEL=log_decay.dim() == 3,
        )
        return out


def _tensors(batch: StateBatch) -> tuple[Tensor, ...]:
    tokens = batch.q_start, batch.q_stop
    return batch.slots, batch.write_slots, *tokens, batch.snap_start, batch.snap_ends, batch.snap_slots
