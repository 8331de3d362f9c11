"""The native twins of the ops in recurrence.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels, address, view
from forebay.ops.reference.recurrence import Convolution, DeltaGates, RecurrenceOps, Scan, StateBatch

_MOST_TAPS = 10  # kMostTaps of cpu/conv.cpp


class NativeRecurrence(RecurrenceOps):
    """See `RecurrenceOps`. The last dimension of every tensor is contiguous, and so are a token's heads."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._causal_conv = kernels.by_dtype("fb_causal_conv_{}")
        self._mamba2_scan = kernels.by_dtypes("fb_mamba2_scan_{}_{}")
        self._mamba1_scan = kernels.by_dtypes("fb_mamba1_scan_{}_{}")
        self._gated_delta_rule = kernels.by_dtypes("fb_gated_delta_rule_{}_{}")
        self._delta_gates = kernels.by_dtype("fb_delta_gates_{}")

    def causal_conv(self, x: Tensor, conv: Convolution, state: Tensor, batch: StateBatch) -> Tensor:
        (tokens, channels), taps = x.shape, conv.weight.shape[0]
        assert 2 <= taps <= _MOST_TAPS, f"a convolution of {taps} taps"
        out = x.new_empty(tokens, channels)
        weights = conv.weight.data_ptr(), address(conv.bias)
        self._causal_conv[x.dtype](
            self._pool, *view(x), *weights, *_states(state, batch), out.data_ptr(), channels, taps, conv.silu
        )
        return out

    def mamba2_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, heads, head_size = x.shape
        _, groups, state_size = b.shape
        out = x.new_empty(tokens, heads, head_size)
        common = (*_scanned(x, dt, b, c, scan), *_states(state, batch), out.data_ptr())
        sizes = (heads, groups, head_size, state_size)
        self._mamba2_scan[x.dtype, state.dtype](self._pool, *common, *sizes, *scan.dt_limit)
        return out

    def mamba1_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, channels = x.shape
        out = x.new_empty(tokens, channels)
        common = (*_scanned(x, dt, b, c, scan), *_states(state, batch), out.data_ptr())
        self._mamba1_scan[x.dtype, state.dtype](self._pool, *common, channels, b.shape[1])
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        tokens, value_heads, value_size = v.shape
        _, key_heads, key_size = k.shape
        out = v.new_empty(tokens, value_heads, value_size)
        inputs = (*view(q), *view(k), *view(v), *view(log_decay), 1 if log_decay.dim() == 2 else key_size)
        sizes = (key_heads, value_heads, key_size, value_size, key_size**-0.5)
        self._gated_delta_rule[v.dtype, state.dtype](
            self._pool, *inputs, *view(beta), *_states(state, batch), out.data_ptr(), *sizes
        )
        return out

    def delta_gates(self, decay: Tensor, beta: Tensor, gates: DeltaGates) -> tuple[Tensor, Tensor]:
        (rows, n), heads = decay.shape, beta.shape[1]
        log_decay, opened = (torch.empty(rows, size, dtype=torch.float32) for size in (n, heads))
        weights = gates.scale.data_ptr(), gates.bias.data_ptr(), address(gates.rate)
        results = log_decay.data_ptr(), opened.data_ptr()
        self._delta_gates[decay.dtype](
            self._pool, *view(decay), *view(beta), *weights, gates.most_beta, *results, rows, n, heads
        )
        return log_decay, opened


def _scanned(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan) -> tuple[int, ...]:
    weights = scan.d.data_ptr(), scan.dt_bias.data_ptr()
    return (*view(x), *view(dt), scan.a.data_ptr(), *view(b), *view(c), *weights)


def _states(table: Tensor, batch: StateBatch) -> tuple[int, ...]:
    """The states, and the arguments of FOREBAY_BATCH in cpu/recurrence.h."""
    slots = batch.slots.data_ptr(), batch.write_slots.data_ptr()
    tokens = batch.q_start.data_ptr(), batch.q_stop.data_ptr()
    snaps = batch.snap_start.data_ptr(), batch.snap_ends.data_ptr(), batch.snap_slots.data_ptr()
    return (table.data_ptr(), *slots, *tokens, *snaps, batch.slots.shape[0])
