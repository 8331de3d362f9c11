"""The recurrent ops as cases: random inputs, the call, and a loop in float64 that shares nothing with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.reference.recurrence import Convolution, Scan, StateBatch
from tests.ops.helpers import normal

Array = NDArray[np.float64]
Inputs = dict[str, Tensor]


def state_batch(
    lens: Sequence[int],
    slots: Sequence[int],
    snapshots: Sequence[Sequence[tuple[int, int]]] = (),
    *,
    write_slots: Sequence[int] | None = None,
    before: Sequence[int] | None = None,
) -> StateBatch:
    """`snapshots` of each sequence: (tokens of it in this step, slot). `write_slots` None: as in an ordinary step.
    `before`: tokens of each before this step, None for none."""
    starts = np.cumsum([0, *lens])
    per_seq = [list(snapshots[i]) if i < len(snapshots) else [] for i in range(len(lens))]
    flat = [(int(starts[i]) + length, slot) for i, snaps in enumerate(per_seq) for length, slot in snaps]

    def ints(values: Any) -> Tensor:
        return torch.tensor([int(v) for v in values], dtype=torch.int32)

    return StateBatch(
        slots=ints(slots),
        write_slots=ints(slots if write_slots is None else write_slots),
        q_start=ints(starts),
        q_stop=ints(starts[1:]),
        snap_start=ints(np.cumsum([0, *map(len, per_seq)])),
        snap_ends=ints(end for end, _ in flat),
        snap_slots=ints(slot for _, slot in flat),
        positions=torch.tensor([(before[i] if before else 0) + t for i, n in enumerate(lens) for t in range(n)]).long(),
    )


class Case(Protocol):
    """`inputs` are what each token brings; the rest of an op's parameters are fixed by the case."""

    def state_shape(self) -> tuple[int, ...]: ...

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> Inputs: ...

    def call(self, ops: Ops, inputs: Inputs, state: Tensor, batch: StateBatch) -> Tensor: ...

    def naive(self, inputs: dict[str, Array], state: Array) -> Array:
        """One sequence, its state [..] changed in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class Conv:
    channels: int
    taps: int
    bias: bool = True
    silu: bool = True
    dtype: torch.dtype = field(default=torch.float32)

    def state_shape(self) -> tuple[int, ...]:
        return (self.taps - 1, self.channels)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
        return {"x": normal((tokens, self.channels), dtype, seed)}

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        bias = normal((self.channels,), dtype, seed=91) if self.bias else None
        return normal((self.taps, self.channels), dtype, seed=90), bias

    def call(self, ops: Ops, inputs: Inputs, state: Tensor, batch: StateBatch) -> Tensor:
        conv = Convolution(*self.weights(inputs["x"].dtype), silu=self.silu)
        return ops.recurrence.causal_conv(inputs["x"], conv, state, batch)

    def naive(self, inputs: dict[str, Array], state: Array) -> Array:
        weight, bias = (None if w is None else w.double().numpy() for w in self.weights(self.dtype))
        assert weight is not None
        outputs = []
        for x in inputs["x"]:
            window = np.concatenate([state, x[None]])
            y = (window * weight).sum(axis=0) + (0 if bias is None else bias)
            outputs.append(y / (1 + np.exp(-y)) if self.silu else y)
            state[:] = window[1:]
        return np.array(outputs)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    heads: int
    groups: int
    head_size: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, math.inf)

    def state_shape(self) -> tuple[int, ...]:
        return (self.heads, self.state_size, self.head_size)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
        return {
            "x": normal((tokens, self.heads, self.head_size), dtype, seed),
            "dt": normal((tokens, self.heads), dtype, seed + 1),
            "b": normal((tokens, self.groups, self.state_size), dtype, seed + 2, self.state_size**-0.5),
            "c": normal((tokens, self.groups, self.state_size), dtype, seed + 3),
        }

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, d, dt_bias."""
        a, d, dt_bias = (normal((self.heads,), torch.float32, seed=s) for s in (80, 81, 82))
        return -a.exp(), d, dt_bias

    def call(self, ops: Ops, inputs: Inputs, state: Tensor, batch: StateBatch) -> Tensor:
        x, dt, b, c = (inputs[name] for name in ("x", "dt", "b", "c"))
        return ops.recurrence.mamba2_scan(x, dt, b, c, Scan(*self.weights(), self.dt_limits), state, batch)

    def naive(self, inputs: dict[str, Array], state: Array) -> Array:
        a, d, dt_bias = (w.double().numpy() for w in self.weights())
        out = np.empty_like(inputs["x"])
        for t in range(len(out)):
            for h in range(self.heads):
                group = h * self.groups // self.heads
                dt = np.clip(np.log1p(np.exp(inputs["dt"][t, h] + dt_bias[h])), *self.dt_limits)
                x = inputs["x"][t, h]
                state[h] = np.exp(dt * a[h]) * state[h] + dt * np.outer(inputs["b"][t, group], x)
                out[t, h] = inputs["c"][t, group] @ state[h] + d[h] * x
        return out


@dataclass(frozen=True, kw_only=True)
class Mamba1:
    channels: int
    state_size: int

    def state_shape(self) -> tuple[int, ...]:
        return (self.channels, self.state_size)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
        return {
            "x": normal((tokens, self.channels), dtype, seed),
            "dt": normal((tokens, self.channels), dtype, seed + 1),
            "b": normal((tokens, self.state_size), dtype, seed + 2, self.state_size**-0.5),
            "c": normal((tokens, self.state_size), dtype, seed + 3),
        }

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, d, dt_bias."""
        d, dt_bias = (normal((self.channels,), torch.float32, seed=s) for s in (81, 82))
        return -normal(self.state_shape(), torch.float32, seed=80).exp(), d, dt_bias

    def call(self, ops: Ops, inputs: Inputs, state: Tensor, batch: StateBatch) -> Tensor:
        x, dt, b, c = (inputs[name] for name in ("x", "dt", "b", "c"))
        return ops.recurrence.mamba1_scan(x, dt, b, c, Scan(*self.weights()), state, batch)

    def naive(self, inputs: dict[str, Array], state: Array) -> Array:
        a, d, dt_bias = (w.double().numpy() for w in self.weights())
        out = np.empty_like(inputs["x"])
        for t, x in enumerate(inputs["x"]):
            dt = np.log1p(np.exp(inputs["dt"][t] + dt_bias))
            for i in range(self.channels):
                state[i] = np.exp(dt[i] * a[i]) * state[i] + dt[i] * x[i] * inputs["b"][t]
                out[t, i] = state[i] @ inputs["c"][t] + d[i] * x[i]
        return out


@dataclass(frozen=True, kw_only=True)
class Delta:
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    per_channel: bool = False

    def state_shape(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_size, self.value_size)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
        decays = (self.value_heads, self.key_size) if self.per_channel else (self.value_heads,)
        return {
            "q": normal((tokens, self.key_heads, self.key_size), dtype, seed),
            "k": normal((tokens, self.key_heads, self.key_size), dtype, seed + 1),
            "v": normal((tokens, self.value_heads, self.value_size), dtype, seed + 2),
            "log_decay": -normal((tokens, *decays), torch.float32, seed + 3).exp() / 8,
            "beta": normal((tokens, self.value_heads), torch.float32, seed + 4).sigmoid(),
        }

    def call(self, ops: Ops, inputs: Inputs, state: Tensor, batch: StateBatch) -> Tensor:
        q, k, v, log_decay, beta = (inputs[name] for name in ("q", "k", "v", "log_decay", "beta"))
        return ops.recurrence.gated_delta_rule(q, k, v, log_decay, beta, state, batch)

    def naive(self, inputs: dict[str, Array], state: Array) -> Array:
        out = np.empty_like(inputs["v"])
        for t in range(len(out)):
            for h in range(self.value_heads):
                q, k = (inputs[name][t, h * self.key_heads // self.value_heads] for name in ("q", "k"))
                q, k = q / np.sqrt(q @ q + 1e-6), k / np.sqrt(k @ k + 1e-6)
                kept = np.exp(inputs["log_decay"][t, h]).reshape(-1, 1) * state[h]
                written = inputs["beta"][t, h] * (inputs["v"][t, h] - k @ kept)
                state[h] = kept + np.outer(k, written)
                out[t, h] = q @ state[h] * self.key_size**-0.5
        return out


CASES: dict[str, Case] = {
    "conv": Conv(channels=200, taps=4),
    "conv-of-3-without-silu": Conv(channels=7, taps=3, bias=False, silu=False),
    "conv-of-2": Conv(channels=33, taps=2, bias=False),
    "conv-of-10": Conv(channels=16, taps=10),
    "mamba2": Mamba2(heads=4, groups=2, head_size=16, state_size=32),
    "mamba2-wide": Mamba2(heads=2, groups=1, head_size=64, state_size=128, dt_limits=(0.1, 1.5)),
    "mamba2-odd": Mamba2(heads=3, groups=3, head_size=6, state_size=11),
    "mamba1": Mamba1(channels=70, state_size=16),
    "mamba1-odd": Mamba1(channels=7, state_size=5),
    "delta": Delta(key_heads=2, value_heads=4, key_size=16, value_size=64),
    "delta-wide": Delta(key_heads=1, value_heads=2, key_size=128, value_size=160),
    "delta-odd": Delta(key_heads=2, value_heads=2, key_size=9, value_size=7),
    "kda": Delta(key_heads=2, value_heads=2, key_size=32, value_size=32, per_channel=True),
    "kda-odd": Delta(key_heads=1, value_heads=3, key_size=21, value_size=70, per_channel=True),
}


def cut(inputs: Inputs, begin: int, end: int) -> Inputs:
    return {name: x[begin:end] for name, x in inputs.items()}


def joined(parts: Sequence[Inputs]) -> Inputs:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def state_table(case: Case, slots: int, dtype: torch.dtype, seed: int) -> Tensor:
    """As if sequences had been there before; slot 0 is zeros."""
    table = normal((slots, *case.state_shape()), dtype, seed, scale=0.5)
    table[0] = 0
    return table
