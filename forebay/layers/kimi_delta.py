"""Kimi delta attention: the gated delta rule with a decay for each channel of a key, and a sigmoid output gate.

Kimi Linear, arXiv 2510.26692, section 3. Shape letters: T tokens, H hidden size, Hv heads, D their size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forebay.families.base.mixers import KimiDelta
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import rows_of_heads
from forebay.layers.states import States
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.recurrence import Convolution, DeltaGates
from forebay.pools.cache_spec import RecentInputs, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaSpec:
    """`low_rank`: decays and gates come from D dimensions that each of them takes of the input. `a_log_shape` is the
    checkpoint's, with one entry for each head."""

    name: str
    hidden_size: int
    delta: KimiDelta
    norm_eps: float
    low_rank: bool
    a_log_shape: tuple[int, ...]
    output_name: str = "o_proj"
    for_ranks: ClassVar[bool] = True

    @property
    def gate_rank(self) -> int:
        """Output width of the first of two linear layers, for decays and for gates."""
        return self.delta.head_dim if self.low_rank else self.delta.size

    def build(self, parts: Parts) -> KimiDeltaLayer:
        return KimiDeltaLayer(self, parts)


class KimiDeltaLayer:
    """Kimi delta attention mixer; x [T, H] -> [T, H]."""

    def __init__(self, spec: KimiDeltaSpec, parts: Parts) -> None:
        parts, share, whole, lowest = parts.within(spec.name), parts.share, spec.delta, spec.delta.lower_bound
        own = share.of(whole.num_heads, "heads")
        delta = replace(whole, num_heads=len(own))
        size, heads, dim = delta.size, delta.num_heads, delta.head_dim
        self._ops, self._delta, self._exchange = parts.ops, delta, share.exchange
        self._rank = spec.gate_rank if spec.low_rank else size
        inputs = 6 * size + 2 * self._rank + heads + 2 * (size + heads)
        ssm, recent = (heads, dim, dim), RecentInputs(float32=(size, heads), model=(size, size))
        conv = (delta.width - 1, 3 * size)
        self._layer = parts.keep(RecurrentState(conv=conv, ssm=ssm, inputs=inputs, recent=recent))
        decay, gate = ("f_a_proj", "g_a_proj") if spec.low_rank else ("f_proj", "g_proj")
        outputs = {**{f"{part}_proj": whole.size for part in "qkv"}, decay: spec.gate_rank, gate: spec.gate_rank}
        of_heads = (whole.num_heads, own, dim)
        gates = (1, range(1), spec.gate_rank) if spec.low_rank else of_heads
        rows = rows_of_heads(of_heads, of_heads, of_heads, gates, gates, (whole.num_heads, own, 1))
        self._inputs = parts.linear({**outputs, "b_proj": whole.num_heads}, spec.hidden_size, own=share.part(*rows))
        second, own_size = ("f_b_proj", "g_b_proj") if spec.low_rank else (), share.part(*rows[:1])
        self._second_layers = tuple(parts.linear({name: whole.size}, dim, own=own_size) for name in second)
        self._output = parts.gathered(spec.output_name, spec.hidden_size, whole.size)
        kernels = {f"{part}_conv1d": whole.size for part in "qkv"}
        kernel = parts.conv_kernel(kernels, whole.width, share.part(*rows[:3]))
        self._conv = Convolution(kernel, None, silu=True)

        def rates(a_log: Tensor) -> Tensor:
            rate = a_log.flatten()[own.start : own.stop].exp().repeat_interleave(dim)
            return rate if lowest else -rate

        rate = parts.tensor("A_log", *spec.a_log_shape, float32=True, change=rates)
        bias = parts.tensor("dt_bias", whole.size, float32=True, own=own_size)
        self._gates = DeltaGates(torch.full_like(rate, lowest), bias, rate) if lowest else DeltaGates(rate, bias)
        weight = parts.tensor("o_norm.weight", dim)
        self._norm = GatedNorm(weight, spec.norm_eps, dim, norm_first=True, sigmoid=True)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        delta, ops, rank = self._delta, self._ops, self._rank
        sizes = [3 * delta.size, rank, rank, delta.num_heads]
        mixed, decay, gate, beta = torch.split(self._inputs(ctx, x), sizes, dim=-1)
        if self._second_layers:
            decay, gate = (layer(ctx, y) for layer, y in zip(self._second_layers, (decay, gate), strict=True))
        state = ctx.cache.state(self._layer)
        mixed = States.of(ctx).run(ops.recurrence.causal_conv, mixed, self._conv, state.conv)
        heads = (len(x), delta.num_heads, delta.head_dim)
        q, k, v = (part.view(heads) for part in mixed.chunk(3, dim=-1))
        log_decay, beta = ops.recurrence.delta_gates(decay, beta, self._gates)
        out = (
            States.of(ctx)
            .run(ops.recurrence.gated_delta_rule, q, k, v, log_decay.view(heads), beta, state.ssm)
            .flatten(1)
        )
        return self._output(ctx, self._exchange.gather(ops.norms.gated_rms_norm(out, gate, self._norm)))
