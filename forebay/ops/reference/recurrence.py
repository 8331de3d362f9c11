"""The ops of recurrent layers: what each does for every backend, and its definition in torch.

All of them run a recurrence over a packed batch: sequence i's tokens are `q_start[i]..q_stop[i]`, its state is read
from row `slots[i]` of the layer's state table and after its last token written to row `write_slots[i]`. Where the batch
names a snapshot, the state as it is after that token is also written to the snapshot's row. Tokens are taken one after
the other, whatever the step's length, and the state is rounded to its table's dtype after each (the token's own output
is read before that): so a sequence's results and states do not depend, by a bit, on how it was cut into steps (native
ops), and decoding is prefill of one token.

Shape letters: T tokens, S sequences, N snapshots, K state rows (slot 0 is the padding slot), C channels, W kernel
width; H heads, P head size, G groups, D state size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Which states a step reads and writes. All int32 but the positions.

    Sequence i's snapshots are entries `snap_start[i]..snap_start[i+1]`, in ascending order of `snap_ends`, each inside
    the sequence: the state after token `snap_ends[j] - 1` of the packed batch goes to row `snap_slots[j]`, too. One
    with slot 0 is no snapshot, and its end means nothing: so a replayed step has an entry for each sequence. Sequences
    of no token leave their state alone. Padded sequences name slot 0: it is read but never written (C14).
    `write_slots[i]` is `slots[i]`, or 0 for a sequence that is verified: it is not known yet which of its tokens stay,
    so its state is written nowhere. No other slot is named twice. The outputs for the tokens from `q_stop[i]` to the
    next sequence's first are undefined: there are such tokens if only the tokens that stay are run again.
    """

    slots: Tensor  # [S]
    write_slots: Tensor  # [S]
    q_start: Tensor  # [S + 1]
    q_stop: Tensor  # [S]
    snap_start: Tensor  # [S + 1]
    snap_ends: Tensor  # [N]
    snap_slots: Tensor  # [N]
    positions: Tensor  # [T] int64, of the packed batch's tokens in their sequences


class Convolution(NamedTuple):
    """weight [W, C], of 2 to 10 rows, and bias [C], both in the dtype of the input; `silu` is applied to the output."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


class Scan(NamedTuple):
    """float32: a (negative) is [I, D] of Mamba-1 and [H] of Mamba-2, d and dt_bias are [I] and [H]. Mamba-2 clamps dt
    to the two of `dt_limit`."""

    a: Tensor
    d: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float] = (0.0, math.inf)


class DeltaGates(NamedTuple):
    """scale, bias and rate [N], float32."""

    scale: Tensor
    bias: Tensor
    rate: Tensor | None = None
    most_beta: float = 1.0


class RecurrenceOps:
    """In torch all sequences take their t-th token together."""

    def causal_conv(self, x: Tensor, conv: Convolution, state: Tensor, batch: StateBatch) -> Tensor:
        """A depthwise causal convolution: y[t] = bias + sum over j of weight[j] * x[t - W + 1 + j], then silu if asked.

        x [T, C], which may be a view into wider rows -> [T, C] in x's dtype. state [K, W - 1, C] in x's dtype holds the
        last W - 1 inputs, the oldest first; zeros before the first input. Computed in float32, rounded once.
        """
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
        """Mamba-2's state-space scan: with dt' = clamp(softplus(dt + dt_bias), *dt_limit) per head,

            state = state * exp(dt' * a) + b outer (dt' * x);   y = c @ state + d * x

        x [T, H, P], dt [T, H], b and c [T, G, D] of one dtype, which may be views into wider rows: head h reads group
        h // (H / G); state [K, H, D, P] -> [T, H, P] in x's dtype. Computed in float32. Mamba-2, arXiv 2405.21060,
        section 6 (the recurrent form).
        """
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
        """Mamba-1's selective scan: with dt' = softplus(dt + dt_bias) per channel,

            state = state * exp(dt' * a) + (dt' * x) * b;   y = state @ c + d * x

        x, dt [T, I], b and c [T, D], state [K, I, D] -> [T, I] in x's dtype. Mamba, arXiv 2312.00752, section 3.
        """
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
        """The gated delta rule, per value head h, with its key head h // (Hv / Hk). First q and k are divided by
        sqrt(sum of squares + 1e-6) over Dk, then q by sqrt(Dk).

            state = state * exp(log_decay);  state += k outer (beta * (v - k @ state));  y = q @ state

        q and k [T, Hk, Dk], v [T, Hv, Dv], beta [T, Hv] float32, state [K, Hv, Dk, Dv] -> [T, Hv, Dv] in v's dtype.
        log_decay float32 is [T, Hv] (gated delta net, arXiv 2412.06464, section 3) or [T, Hv, Dk], a decay for each key
        channel (Kimi delta attention, arXiv 2510.26692, section 3). Computed in float32. q, k, v may be views into
        wider rows.
        """
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
        """`log_decay` and `beta` of `gated_delta_rule`, from the outputs of a linear layer:

            log_decay = scale * softplus(decay + bias), or with a `rate` scale * sigmoid(rate * (decay + bias))
            beta = most_beta * sigmoid(beta)

        decay [T, N] and beta [T, Hv] (may be views into wider rows) -> [T, N] and [T, Hv] float32, computed so.
        """
        shifted = decay.float() + gates.bias
        bounded = F.softplus(shifted) if gates.rate is None else (gates.rate * shifted).sigmoid()
        return gates.scale * bounded, gates.most_beta * beta.float().sigmoid()


def _scan(table: Tensor, batch: StateBatch, step: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Run a recurrence: `step(states, at)` takes the float32 states of those sequences that still have a token, and
    the places of these tokens in the packed batch, and returns the states after them.
    """
    starts, slots = batch.q_start[:-1].long(), batch.slots.long()
    lens = batch.q_stop.long() - starts
    snap_seqs = torch.repeat_interleave(batch.snap_start.diff())
    snap_steps = batch.snap_ends - 1 - starts[snap_seqs]
    states = table[slots]
    for t in range(int(lens.max()) if len(lens) else 0):
        active = torch.where(lens > t)[0]
        states[active] = step(states[active].float(), starts[active] + t).to(table.dtype)
        due = torch.where(snap_steps == t)[0]
        write_states(table, batch.snap_slots[due].long(), states[snap_seqs[due]])
    ran = torch.where(lens > 0)[0]
    write_states(table, batch.write_slots[ran].long(), states[ran])


def write_states(table: Tensor, slots: Tensor, states: Tensor) -> None:
    """Slot 0 stays what it is: padded sequences never add up there (C14)."""
    real = slots > 0
    table[slots[real]] = states[real]


def _unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(dim=-1, keepdim=True) + 1e-6).sqrt()
