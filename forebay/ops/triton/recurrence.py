"""Convolutions, and the recurrences of layers with states: those in chunks (`scans`), and Mamba 1 token by token.

Mamba 1's decays differ by every entry of a state, so that no product computes them. Its scan is one program per
sequence and part of the state. It takes the sequence's tokens in turn, with its part of the state in registers, and
loads the next token's inputs meanwhile. A part is as large for a prompt as for a decode: its sums have one order in
both. Shape letters as in ops/reference/recurrence.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.base.scan_rows import CHUNK, part_offsets
from forebay.ops.reference.recurrence import Convolution, RecurrenceOps, Scan, StateBatch
from forebay.ops.triton import scans
from forebay.ops.triton.common import owner, softplus
from forebay.ops.triton.launch import kernel
from forebay.ops.triton.scans import next_snapshot

_CHANNELS: Final = 256  # of a convolution, in one program
_STATE_COLUMNS: Final = 16  # of a state that is scanned in chunks, in one program
_THREE_PROGRAMS: Final = 168  # registers of a thread with which a core has three programs of 128 threads
_SCAN_ELEMENTS: Final = 2048  # of a state of Mamba 1, in one program: its rows are short


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
    snap = next_snapshot(tl.load(snap_start + seq), snap_stop, snap_slots)
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
        snap = next_snapshot(snap + due.to(tl.int32), snap_stop, snap_slots)
    mine = state + write_slot * channels * D
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
        groups, state_size = b.shape[1:]
        row = _Row(state, heads * p * state_size, ((x, heads * p), (b, groups * state_size), (dt, heads)))
        x_at, b_at, dt_at = row.offsets
        out = torch.empty(tokens, heads, p, dtype=x.dtype, device=x.device)
        num_seqs, chunks = _programs(tokens, batch)
        shares = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=x.device)
        edges = torch.empty(chunks, heads, 2, CHUNK, dtype=torch.float32, device=x.device)
        sizes: dict[str, int] = {"HEADS": heads, "GROUPS": groups, "D": state_size, "D_BLOCK": _block(state_size)}
        sizes |= {"ROW": row.num_bytes, "B_AT": b_at, "CHUNK": CHUNK}
        scans.prepare_mamba2[(chunks, heads)](
            dt,
            scan.a,
            b,
            c,
            scan.dt_bias,
            state,
            shares,
            edges,
            batch.slots,
            batch.q_start,
            batch.q_stop,
            batch.positions,
            num_seqs,
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            *scan.dt_limit,
            DT_AT=dt_at,
            num_warps=1,
            **sizes,
        )
        p_block = min(_block(p), _STATE_COLUMNS)
        keep_recent = row.keeping(batch, num_seqs)
        scans.scan_mamba2[(num_seqs, heads, triton.cdiv(p, p_block))](
            x,
            b,
            c,
            scan.d,
            shares,
            edges,
            state,
            out,
            *_tensors(batch),
            batch.positions,
            x.stride(0),
            b.stride(0),
            c.stride(0),
            P=p,
            X_AT=x_at,
            P_BLOCK=p_block,
            **_options(sizes["D_BLOCK"]),
            **sizes,
        )
        keep_recent()
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
        key_heads, dk = k.shape[1:]
        per_channel = log_decay.dim() == 3
        decays = heads * (dk if per_channel else 1)
        recent = (log_decay, decays), (beta, heads), (k, key_heads * dk), (v, heads * dv)
        row = _Row(state, heads * dk * dv, recent)
        decay_at, beta_at, k_at, v_at = row.offsets
        out = torch.empty(tokens, heads, dv, dtype=v.dtype, device=v.device)
        num_seqs, chunks = _programs(tokens, batch)
        solved, shares = torch.empty(2, chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=v.device)
        edges = torch.empty(chunks, heads, 4, CHUNK, dtype=torch.float32, device=v.device)
        sizes: dict[str, int] = {"HEADS": heads, "KEY_HEADS": key_heads, "DK": dk, "DK_BLOCK": _block(dk)}
        sizes |= {"PER_CHANNEL": per_channel, "ROW": row.num_bytes, "DECAY_AT": decay_at, "K_AT": k_at, "CHUNK": CHUNK}
        scans.prepare_delta[(chunks, heads)](
            q,
            k,
            log_decay,
            beta,
            state,
            solved,
            shares,
            edges,
            batch.slots,
            batch.q_start,
            batch.q_stop,
            batch.positions,
            num_seqs,
            dk**-0.5,
            q.stride(0),
            k.stride(0),
            BETA_AT=beta_at,
            num_warps=4 if per_channel else 1,
            **sizes,
        )
        v_block = min(_block(dv), _STATE_COLUMNS)
        keep_recent = row.keeping(batch, num_seqs)
        scans.scan_delta[(num_seqs, heads, triton.cdiv(dv, v_block))](
            q,
            k,
            v,
            log_decay,
            solved,
            shares,
            edges,
            state,
            out,
            *_tensors(batch),
            batch.positions,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            DV=dv,
            V_AT=v_at,
            DV_BLOCK=v_block,
            **_options(sizes["DK_BLOCK"], per_channel=per_channel),
            **sizes,
        )
        keep_recent()
        return out


class _Row:
    """The row of a slot: a state of `entries`, and behind it of each token of the open chunk the columns of inputs."""

    def __init__(self, state: Tensor, entries: int, recent: Sequence[tuple[Tensor, int]]) -> None:
        sizes = (columns * part.element_size() for part, columns in recent)
        *self.offsets, self.num_bytes = part_offsets(entries * state.element_size(), sizes)
        found = state.stride(0) * state.element_size()
        assert found == self.num_bytes, f"rows of {found} bytes, {self.num_bytes} with the inputs of {CHUNK} tokens"
        self._state, self._recent = state, recent

    def keeping(self, batch: StateBatch, num_seqs: int) -> Callable[[], None]:
        """Return what writes the inputs of this step's tokens, as far as their chunks are open, to the slots.

        Its kernel is compiled here: the scan before it changes states.
        """
        parts = [(part, at, columns) for (part, columns), at in zip(self._recent, self.offsets, strict=True)]
        (x, x_at, x_columns), (y, y_at, y_columns), (z, z_at, z_columns), *more = parts
        u, u_at, u_columns = more[0] if more else (x, 0, 0)
        strides = x.stride(0), y.stride(0), z.stride(0), u.stride(0)
        inputs = x, y, z, u, self._state, *_tensors(batch), batch.positions, *strides
        sizes = {
            "ROW": self.num_bytes,
            "X_AT": x_at,
            "X_COLUMNS": x_columns,
            "Y_AT": y_at,
            "Y_COLUMNS": y_columns,
            "Z_AT": z_at,
            "Z_COLUMNS": z_columns,
            "U_AT": u_at,
            "U_COLUMNS": u_columns,
            "CHUNK": CHUNK,
            "BLOCK": _CHANNELS,
        }
        if num_seqs:
            scans.keep_recent.require(*inputs, **sizes)
        grid = num_seqs, sum(triton.cdiv(columns, _CHANNELS) for _, columns in self._recent)
        return partial(scans.keep_recent[grid], *inputs, **sizes)


def by_tokens(
    op: Callable[..., Tensor], *inputs: Any, shape: tuple[int, ...], state: Tensor, batch: StateBatch
) -> Tensor:
    """Run the definition of a scan on the states of rows: it keeps nothing of an open chunk."""
    return op(RecurrenceOps(), *inputs, state[:, : math.prod(shape)].unflatten(1, shape), batch)


def _block(size: int) -> int:
    """Entries of a tile: matrix units take 16 of them at least."""
    return max(16, triton.next_power_of_2(size))


def _options(width: int, *, per_channel: bool = False) -> dict[str, int]:
    """Return the launch options of a scan of states that are `width` wide: what fits registers of sm_80, 90 and 100."""
    if per_channel:
        return {"num_warps": 8}
    return {"num_warps": 4, "maxnreg": _THREE_PROGRAMS} if width <= 128 else {"num_warps": 4}


def _programs(tokens: int, batch: StateBatch) -> tuple[int, int]:
    """Return the sequences and the chunks for which there are programs: none of a step without tokens."""
    num_seqs = len(batch.slots) if tokens else 0
    return num_seqs, tokens // CHUNK + 2 * num_seqs


def _tensors(batch: StateBatch) -> tuple[Tensor, ...]:
    tokens = batch.q_start, batch.q_stop
    return batch.slots, batch.write_slots, *tokens, batch.snap_start, batch.snap_ends, batch.snap_slots
