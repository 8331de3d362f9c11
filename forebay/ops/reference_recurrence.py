"""The definition in torch of the ops in recurrence.py: all sequences take their t-th token together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.ops.recurrence import Convolution, DeltaGates, GatedNorm, Scan, StateBatch


class TorchRecurrence:
    """See `RecurrenceOps`."""

    def causal_conv(self, x: Tensor, conv: Convolution, state: Tensor, batch: StateBatch) -> Tensor:
        x32, weight32 = x.float(), conv.weight.float()
        out = torch.zeros_like(x32, memory_format=torch.contiguous_format)

        def step(last: Tensor, at: Tensor) -> Tensor:
            inputs = torch.cat([last, x32[at].unsqueeze(1)], dim=1)
            out[at] = (inputs * weight32).sum(dim=1)
            return inputs[:, 1:]

        _scan(state, batch, step)
        if conv.bias is not None:
            out += conv.bias.float()
        return (F.silu(out) if conv.silu else out).to(x.dtype)

    def mamba2_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        x32, per_group = x.float(), x.shape[1] // b.shape[1]
        dt32 = F.softplus(dt.float() + scan.dt_bias).clamp(*scan.dt_limit)
        decay = (dt32 * scan.a).exp()[..., None, None]
        scaled = (dt32.unsqueeze(-1) * x32).unsqueeze(-2)
        b32, c32 = (part.float().repeat_interleave(per_group, dim=1) for part in (b, c))
        out = scan.d.unsqueeze(-1) * x32

        def step(before: Tensor, at: Tensor) -> Tensor:
            after = before * decay[at] + b32[at].unsqueeze(-1) * scaled[at]
            out[at] += (c32[at].unsqueeze(-2) @ after).squeeze(-2)
            return after

        _scan(state, batch, step)
        return out.to(x.dtype)

    def mamba1_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch
    ) -> Tensor:
        x32, b32, c32 = x.float(), b.float(), c.float()
        dt32 = F.softplus(dt.float() + scan.dt_bias)
        scaled = dt32 * x32
        out = scan.d * x32

        def step(before: Tensor, at: Tensor) -> Tensor:
            decay = (dt32[at].unsqueeze(-1) * scan.a).exp()
            after = before * decay + scaled[at].unsqueeze(-1) * b32[at].unsqueeze(-2)
            out[at] += (after @ c32[at].unsqueeze(-1)).squeeze(-1)
            return after

        _scan(state, batch, step)
        return out.to(x.dtype)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
    ) -> Tensor:
        v32, per_key_head = v.float(), v.shape[1] // q.shape[1]
        q32, k32 = (_unit(part.float()).repeat_interleave(per_key_head, dim=1) for part in (q, k))
        q32 = q32 * q.shape[2] ** -0.5
        decay = log_decay.exp().unsqueeze(-1)
        if decay.dim() == 3:  # one for all key channels
            decay = decay.unsqueeze(-1)
        out = torch.empty(v.shape, dtype=torch.float32)

        def step(before: Tensor, at: Tensor) -> Tensor:
            kept, key = before * decay[at], k32[at]
            recalled = (key.unsqueeze(-2) @ kept).squeeze(-2)
            written = beta[at].unsqueeze(-1) * (v32[at] - recalled)
            after = kept + key.unsqueeze(-1) * written.unsqueeze(-2)
            out[at] = (q32[at].unsqueeze(-2) @ after).squeeze(-2)
            return after

        _scan(state, batch, step)
        return out.to(v.dtype)

    def delta_gates(self, decay: Tensor, beta: Tensor, gates: DeltaGates) -> tuple[Tensor, Tensor]:
        shifted = decay.float() + gates.bias
        bounded = F.softplus(shifted) if gates.rate is None else (gates.rate * shifted).sigmoid()
        return gates.scale * bounded, gates.most_beta * beta.float().sigmoid()

    def gated_rms_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        groups = (len(x), x.shape[1] // norm.group_size, norm.group_size)
        x32, gate32 = x.float().reshape(groups), gate.float().reshape(groups)
        opened = gate32.sigmoid() if norm.sigmoid else F.silu(gate32)
        if not norm.norm_first:
            x32 = x32 * opened
        weight = norm.weight.float().view(-1, norm.group_size)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + norm.eps) * weight
        return (normed * opened if norm.norm_first else normed).reshape(x.shape).to(x.dtype)


def _scan(table: Tensor, batch: StateBatch, step: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Run a recurrence: `step(states, at)` takes the float32 states of those sequences that still have a token, and
    the places of these tokens in the packed batch, and returns the states after them.
    """
    starts, slots = batch.q_start[:-1].long(), batch.slots.long()
    lens = batch.q_start[1:].long() - starts
    snap_seqs = torch.repeat_interleave(batch.snap_start.diff())
    snap_steps = batch.snap_ends - 1 - starts[snap_seqs]
    states = table[slots]
    for t in range(int(lens.max()) if len(lens) else 0):
        active = torch.where(lens > t)[0]
        states[active] = step(states[active].float(), starts[active] + t).to(table.dtype)
        due = torch.where(snap_steps == t)[0]
        _write(table, batch.snap_slots[due].long(), states[snap_seqs[due]])
    ran = torch.where(lens > 0)[0]
    _write(table, slots[ran], states[ran])


def _write(table: Tensor, slots: Tensor, states: Tensor) -> None:
    """Slot 0 stays what it is: padded sequences never add up there (C14)."""
    real = slots > 0
    table[slots[real]] = states[real]


def _unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(dim=-1, keepdim=True) + 1e-6).sqrt()
