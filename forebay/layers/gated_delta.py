"""The gated delta net: a linear layer, a short convolution, the gated delta rule, a gated norm, and a linear layer.

Gated Delta Networks, arXiv 2412.06464, section 3. Shape letters: T tokens, H hidden size, Hk key heads, Hv value heads,
Dk and Dv their sizes, C channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.families.mixers import DeltaNet
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import Rows
from forebay.pools.cache_spec import RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaSpec:
    """`inputs` are the checkpoint's names, behind `name`, of the linear layers whose outputs are, in this order: q, k,
    v, the gate, beta and the decay; `input_rows` where they are in another. `kernels` are the names of the convolutions
    of q, k and v, or that of the one over all. beta goes from 0 to `most_beta`."""

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

    def build(self, parts: Parts) -> GatedDelta:
        return GatedDelta(self, parts)


class GatedDelta:
    def __init__(self, spec: GatedDeltaSpec, parts: Parts) -> None:
        parts, delta, heads = parts.within(spec.name), spec.delta, spec.delta.num_value_heads
        self._spec = spec
        self._ops = parts.ops
        ssm = (heads, delta.key_head_dim, delta.value_head_dim)
        self._layer = parts.keep(RecurrentState(conv=(delta.width - 1, delta.channels), ssm=ssm))
        self._inputs = parts.linear(dict(spec.inputs), spec.hidden_size, rows=spec.input_rows)
        self._output = parts.linear({spec.output_name: spec.hidden_size}, delta.value_size)
        sizes = (delta.channels,) if len(spec.kernels) == 1 else (delta.key_size, delta.key_size, delta.value_size)
        self._kernel = parts.conv_kernel(dict(zip(spec.kernels, sizes, strict=True)), delta.width)
        self._decay = parts.decays(heads)
        self._dt_bias = parts.tensor("dt_bias", heads, float32=True)
        self._norm = parts.tensor(f"{spec.norm_name}.weight", delta.value_head_dim)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        spec, delta, ops, tokens = self._spec, self._spec.delta, self._ops, len(x)
        heads, key_heads = delta.num_value_heads, delta.num_key_heads
        sizes = [delta.channels, delta.value_size, heads, heads]
        mixed, gate, beta, decay = torch.split(self._inputs(ctx, x), sizes, dim=-1)
        state = ctx.cache.state(self._layer)
        mixed = ops.causal_conv(mixed, self._kernel, None, state.conv, ctx.states, silu=True)
        log_decay, beta = ops.delta_gates(decay, beta, self._decay, self._dt_bias, most_beta=spec.most_beta)
        q, k, v = torch.split(mixed, [delta.key_size, delta.key_size, delta.value_size], dim=-1)
        out = ops.gated_delta_rule(
            q.view(tokens, key_heads, delta.key_head_dim),
            k.view(tokens, key_heads, delta.key_head_dim),
            v.view(tokens, heads, delta.value_head_dim),
            log_decay,
            beta,
            state.ssm,
            ctx.states,
            scale=delta.key_head_dim**-0.5,
        )
        normed = ops.gated_rms_norm(
            out.flatten(1),
            gate,
            self._norm,
            spec.norm_eps,
            group_size=delta.value_head_dim,
            norm_first=True,
            sigmoid=False,
        )
        return self._output(ctx, normed)
