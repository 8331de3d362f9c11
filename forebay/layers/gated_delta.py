"""The gated delta net: a linear layer, a short convolution, the gated delta rule, a gated norm, and a linear layer.

Gated Delta Networks, arXiv 2412.06464, section 3. Shape letters: T tokens, H hidden size, Hk key heads, Hv value heads,
Dk and Dv their sizes, C channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forebay.families.base.mixers import DeltaNet
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import Rows, rows_of_heads
from forebay.layers.states import States
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.recurrence import Convolution, DeltaGates
from forebay.pools.cache_spec import RecentInputs, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaSpec:
    """`inputs` are the checkpoint's names, behind `name`, of the linear layers whose outputs are, in this order: q, k,
    v, the gate, beta and the decay; `input_rows` if they are in another. `kernels` are the names of the convolutions of
    q, k and v, or that of the one over all. beta is between 0 and `most_beta`. With
    `sigmoid_gate` the gate is the sigmoid, not a silu."""

    name: str
    hidden_size: int
    delta: DeltaNet
    norm_eps: float
    inputs: Sequence[tuple[str, int]]
    input_rows: Rows = ()
    kernels: Sequence[str] = ("conv1d",)
    norm_name: str = "norm"
    output_name: str = "out_proj"
    most_beta: float = 1.0
    sigmoid_gate: bool = False
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> GatedDelta:
        return GatedDelta(self, parts)


class GatedDelta:
    """Gated delta net mixer (Qwen3-Next, OLMo hybrid); x [T, H] -> [T, H]."""

    def __init__(self, spec: GatedDeltaSpec, parts: Parts) -> None:
        parts, share, whole = parts.within(spec.name), parts.share, spec.delta
        own = share.of(whole.num_value_heads, "value heads")
        keys = share.with_copies(whole.num_key_heads, "key heads")
        delta = replace(whole, num_value_heads=len(own), num_key_heads=len(keys))
        heads, self._exchange = len(own), share.exchange
        self._ops, self._delta = parts.ops, delta
        ssm = (heads, delta.key_head_dim, delta.value_head_dim)
        inputs = 2 * delta.channels + delta.value_size + 2 * heads + 4 * heads  # beta and decays in float32 as well
        recent = RecentInputs(float32=(heads, heads), model=(delta.key_size, delta.value_size))
        conv = (delta.width - 1, delta.channels)
        self._layer = parts.keep(RecurrentState(conv=conv, ssm=ssm, inputs=inputs, recent=recent))
        of_keys = (whole.num_key_heads, keys, whole.key_head_dim)
        of_values, of_heads = ((whole.num_value_heads, own, size) for size in (whole.value_head_dim, 1))
        rows = rows_of_heads(of_keys, of_keys, of_values, of_values, of_heads, of_heads)
        self._inputs = parts.linear(dict(spec.inputs), spec.hidden_size, rows=spec.input_rows, own=share.part(*rows))
        self._output = parts.gathered(spec.output_name, spec.hidden_size, whole.value_size)
        sizes = (whole.channels,) if len(spec.kernels) == 1 else (whole.key_size, whole.key_size, whole.value_size)
        kernels = dict(zip(spec.kernels, sizes, strict=True))
        kernel = parts.conv_kernel(kernels, whole.width, share.part(*rows[:3]))
        self._conv = Convolution(kernel, None, silu=True)
        decay, bias = (
            parts.decays(whole.num_value_heads, own=share.part(own)),
            parts.tensor("dt_bias", whole.num_value_heads, float32=True, own=share.part(own)),
        )
        self._gates = DeltaGates(decay, bias, most_beta=spec.most_beta)
        weight = parts.tensor(f"{spec.norm_name}.weight", delta.value_head_dim)
        self._norm = GatedNorm(weight, spec.norm_eps, delta.value_head_dim, norm_first=True, sigmoid=spec.sigmoid_gate)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        delta, ops, tokens = self._delta, self._ops, len(x)
        heads, key_heads = delta.num_value_heads, delta.num_key_heads
        sizes = [delta.channels, delta.value_size, heads, heads]
        mixed, gate, beta, decay = torch.split(self._inputs(ctx, x), sizes, dim=-1)
        state = ctx.cache.state(self._layer)
        mixed = States.of(ctx).run(ops.recurrence.causal_conv, mixed, self._conv, state.conv)
        log_decay, beta = ops.recurrence.delta_gates(decay, beta, self._gates)
        q, k, v = torch.split(mixed, [delta.key_size, delta.key_size, delta.value_size], dim=-1)
        q, k = (part.view(tokens, key_heads, delta.key_head_dim) for part in (q, k))
        v = v.view(tokens, heads, delta.value_head_dim)
        out = States.of(ctx).run(ops.recurrence.gated_delta_rule, q, k, v, log_decay, beta, state.ssm).flatten(1)
        return self._output(ctx, self._exchange.gather(ops.norms.gated_rms_norm(out, gate, self._norm)))
