"""The Mamba-2 mixer: a linear layer, a short convolution, a state-space scan, a gate, and a linear layer.

Mamba-2, arXiv 2405.21060, section 7. Shape letters: T tokens, H hidden size, I intermediate size, G groups, D state
size, C channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.families.mixers import Mamba2Mixer
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.pools.cache_spec import RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """What a family multiplies the input, the parts of the first linear layer's output, and the mixer's output by."""

    inputs: float = 1.0
    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedNorm:
    """An RMS norm of each group, before (`norm_first`) or after the gate."""

    eps: float
    norm_first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec:
    """`norm` None for a gate alone."""

    name: str
    hidden_size: int
    mixer: Mamba2Mixer
    norm: GatedNorm | None
    multipliers: Multipliers = Multipliers()

    def build(self, parts: Parts) -> Mamba2:
        return Mamba2(self, parts)


class Mamba2:
    def __init__(self, spec: Mamba2Spec, parts: Parts) -> None:
        parts, mixer = parts.within(spec.name), spec.mixer
        heads, channels = mixer.num_heads, mixer.channels
        self._ops, self._mixer = parts.ops, mixer
        ssm = (heads, mixer.state_size, mixer.head_dim)
        self._layer = parts.keep(RecurrentState(conv=(mixer.width - 1, channels), ssm=ssm))
        self._inputs = _inputs(spec, parts)
        scales = ((spec.hidden_size, spec.multipliers.output),)
        self._output = parts.linear(
            {"out_proj": spec.hidden_size}, mixer.intermediate_size, bias=mixer.out_bias, scales=scales
        )
        self._kernel = parts.conv_kernel({"conv1d": channels}, mixer.width)
        self._kernel_bias = parts.tensor("conv1d.bias", channels) if mixer.conv_bias else None
        self._a = parts.decays(heads)
        self._d = parts.tensor("D", heads, float32=True)
        self._dt_bias = parts.tensor("dt_bias", heads, float32=True)
        self._norm = None if spec.norm is None else (spec.norm, parts.tensor("norm.weight", mixer.intermediate_size))

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        mixer, ops = self._mixer, self._ops
        sizes = [mixer.intermediate_size, mixer.channels, mixer.num_heads]
        gate, mixed, dt = torch.split(self._inputs(ctx, x), sizes, dim=-1)
        state = ctx.cache.state(self._layer)
        mixed = ops.causal_conv(mixed, self._kernel, self._kernel_bias, state.conv, ctx.states, silu=True)
        y, b, c = torch.split(mixed, [mixer.intermediate_size, mixer.group_channels, mixer.group_channels], dim=-1)
        low, high = mixer.dt_limit
        scanned = ops.mamba2_scan(
            y.view(len(x), mixer.num_heads, mixer.head_dim),
            dt,
            self._a,
            b.view(len(x), mixer.num_groups, mixer.state_size),
            c.view(len(x), mixer.num_groups, mixer.state_size),
            self._d,
            self._dt_bias,
            state.ssm,
            ctx.states,
            dt_min=low,
            dt_max=high,
        )
        return self._output(ctx, self._gated(scanned.flatten(1), gate))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """y and gate [T, I] -> [T, I]."""
        if self._norm is None:
            return self._ops.mul_silu(y, gate)
        norm, weight = self._norm
        return self._ops.gated_rms_norm(
            y,
            gate,
            weight,
            norm.eps,
            group_size=self._mixer.intermediate_size // self._mixer.num_groups,
            norm_first=norm.norm_first,
            sigmoid=False,
        )


def _inputs(spec: Mamba2Spec, parts: Parts) -> Linear:
    """The gate, what the convolution runs over (x, b, c), and dt."""
    mixer, by = spec.mixer, spec.multipliers
    size, per_group, heads = mixer.intermediate_size, mixer.group_channels, mixer.num_heads
    return parts.linear(
        {"in_proj": size + mixer.channels + heads},
        spec.hidden_size,
        bias=mixer.bias,
        scales=((size, by.gate), (size, by.x), (per_group, by.b), (per_group, by.c), (heads, by.dt)),
        input_scale=by.inputs,
    )
