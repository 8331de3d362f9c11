"""Kimi delta attention: the gated delta rule with a decay for each channel of a key, and a sigmoid output gate.

Kimi Linear, arXiv 2510.26692, section 3. Shape letters: T tokens, H hidden size, Hv heads, D their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.families.mixers import KimiDelta
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
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

    @property
    def gate_rank(self) -> int:
        """Output width of the first of two linear layers, for decays and for gates."""
        return self.delta.head_dim if self.low_rank else self.delta.size

    def build(self, parts: Parts) -> KimiDeltaLayer:
        return KimiDeltaLayer(self, parts)


class KimiDeltaLayer:
    """Kimi delta attention mixer; x [T, H] -> [T, H]."""

    def __init__(self, spec: KimiDeltaSpec, parts: Parts) -> None:
        parts, delta, lowest = parts.within(spec.name), spec.delta, spec.delta.lower_bound
        size, heads, dim = delta.size, delta.num_heads, delta.head_dim
        self._ops, self._delta, self._rank = parts.ops, delta, spec.gate_rank
        inputs = 6 * size + 2 * spec.gate_rank + heads + 2 * (size + heads)
        ssm, recent = (heads, dim, dim), RecentInputs(float32=(size, heads), model=(size, size))
        conv = (delta.width - 1, 3 * size)
        self._layer = parts.keep(RecurrentState(conv=conv, ssm=ssm, inputs=inputs, recent=recent))
        decay, gate = ("f_a_proj", "g_a_proj") if spec.low_rank else ("f_proj", "g_proj")
        outputs = {"q_proj": size, "k_proj": size, "v_proj": size, decay: spec.gate_rank, gate: spec.gate_rank}
        self._inputs = parts.linear({**outputs, "b_proj": heads}, spec.hidden_size)
        second = ("f_b_proj", "g_b_proj") if spec.low_rank else ()
        self._second_layers = tuple(parts.linear({name: size}, dim) for name in second)
        self._output = parts.linear({spec.output_name: spec.hidden_size}, size)
        kernel = parts.conv_kernel({f"{part}_conv1d": size for part in "qkv"}, delta.width)
        self._conv = Convolution(kernel, None, silu=True)

        def rates(a_log: Tensor) -> Tensor:
            rate = a_log.flatten().exp().repeat_interleave(dim)
            return rate if lowest else -rate

        rate = parts.tensor("A_log", *spec.a_log_shape, float32=True, change=rates)
        bias = parts.tensor("dt_bias", size, float32=True)
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
        return self._output(ctx, ops.norms.gated_rms_norm(out, gate, self._norm))
