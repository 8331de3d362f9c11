"""The native twins of the ops in recurrence.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.kernels import Kernels
from forebay.ops.recurrence import StateBatch

_MOST_TAPS = 8  # kMostTaps of cpu/conv.cpp


class NativeRecurrence:
    """See `RecurrenceOps`. The last dimension of every tensor is contiguous, and so are a token's heads."""

    def __init__(self, kernels: Kernels) -> None:
        self._pool = kernels.pool
        self._causal_conv = kernels.by_dtype("fb_causal_conv_{}")
        self._mamba2_scan = kernels.by_dtypes("fb_mamba2_scan_{}_{}")
        self._mamba1_scan = kernels.by_dtypes("fb_mamba1_scan_{}_{}")
        self._gated_delta_rule = kernels.by_dtypes("fb_gated_delta_rule_{}_{}")
        self._delta_gates = kernels.by_dtype("fb_delta_gates_{}")
        self._gated_rms_norm = kernels.by_dtype("fb_gated_rms_norm_{}")

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch, *, silu: bool
    ) -> Tensor:
        tokens, channels = x.shape
        taps = weight.shape[0]
        assert 2 <= taps <= _MOST_TAPS, f"a convolution of {taps} taps"
        out = x.new_empty(tokens, channels)
        self._causal_conv[x.dtype](
            self._pool,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            state.data_ptr(),
            *_batch(batch),
            out.data_ptr(),
            channels,
            taps,
            silu,
        )
        return out

    def mamba2_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: StateBatch,
        *,
        dt_min: float = 0.0,
        dt_max: float = float("inf"),
    ) -> Tensor:
        tokens, heads, head_size = x.shape
        _, groups, state_size = b.shape
        out = x.new_empty(tokens, heads, head_size)
        self._mamba2_scan[x.dtype, state.dtype](
            self._pool,
            x.data_ptr(),
            x.stride(0),
            dt.data_ptr(),
            dt.stride(0),
            a.data_ptr(),
            b.data_ptr(),
            b.stride(0),
            c.data_ptr(),
            c.stride(0),
            d.data_ptr(),
            dt_bias.data_ptr(),
            state.data_ptr(),
            *_batch(batch),
            out.data_ptr(),
            heads,
            groups,
            head_size,
            state_size,
            dt_min,
            dt_max,
        )
        return out

    def mamba1_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: StateBatch,
    ) -> Tensor:
        tokens, channels = x.shape
        out = x.new_empty(tokens, channels)
        self._mamba1_scan[x.dtype, state.dtype](
            self._pool,
            x.data_ptr(),
            x.stride(0),
            dt.data_ptr(),
            dt.stride(0),
            a.data_ptr(),
            b.data_ptr(),
            b.stride(0),
            c.data_ptr(),
            c.stride(0),
            d.data_ptr(),
            dt_bias.data_ptr(),
            state.data_ptr(),
            *_batch(batch),
            out.data_ptr(),
            channels,
            b.shape[1],
        )
        return out

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: StateBatch,
        *,
        scale: float,
        l2_norm: bool = True,
    ) -> Tensor:
        tokens, value_heads, value_size = v.shape
        _, key_heads, key_size = k.shape
        out = v.new_empty(tokens, value_heads, value_size)
        self._gated_delta_rule[v.dtype, state.dtype](
            self._pool,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            log_decay.data_ptr(),
            log_decay.stride(0),
            1 if log_decay.dim() == 2 else key_size,
            beta.data_ptr(),
            beta.stride(0),
            state.data_ptr(),
            *_batch(batch),
            out.data_ptr(),
            key_heads,
            value_heads,
            key_size,
            value_size,
            scale,
            l2_norm,
        )
        return out

    def delta_gates(
        self,
        decay: Tensor,
        beta: Tensor,
        scale: Tensor,
        bias: Tensor,
        rate: Tensor | None = None,
        *,
        most_beta: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        (rows, n), heads = decay.shape, beta.shape[1]
        log_decay, opened = (torch.empty(rows, size, dtype=torch.float32) for size in (n, heads))
        self._delta_gates[decay.dtype](
            self._pool,
            decay.data_ptr(),
            decay.stride(0),
            beta.data_ptr(),
            beta.stride(0),
            scale.data_ptr(),
            bias.data_ptr(),
            None if rate is None else rate.data_ptr(),
            most_beta,
            log_decay.data_ptr(),
            opened.data_ptr(),
            rows,
            n,
            heads,
        )
        return log_decay, opened

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_first: bool, sigmoid: bool
    ) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._gated_rms_norm[x.dtype](
            self._pool,
            x.data_ptr(),
            x.stride(0),
            gate.data_ptr(),
            gate.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            n,
            group_size,
            0 if weight.shape[0] == group_size else group_size,
            eps,
            norm_first,
            sigmoid,
        )
        return out


def _batch(batch: StateBatch) -> tuple[int, int, int, int, int, int]:
    """The arguments of FOREBAY_BATCH in cpu/recurrence.h."""
    slots = batch.slots
    return (
        slots.data_ptr(),
        batch.q_start.data_ptr(),
        batch.snap_start.data_ptr(),
        batch.snap_ends.data_ptr(),
        batch.snap_slots.data_ptr(),
        slots.shape[0],
    )
