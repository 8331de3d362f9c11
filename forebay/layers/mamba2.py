"""The Mamba-2 mixer: a linear layer, a short convolution, a state-space scan, a gate, and a linear layer.

Mamba-2, arXiv 2405.21060, section 7. Shape letters: T tokens, H hidden size, I intermediate size, G groups, D state
size, C channels of the convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """`width` inputs, the token's own included, reach a token through the convolution. `norm` None for a gate alone.

    dt is clamped to the two of `dt_limit`.
    """

    name: str
    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    norm: GatedNorm | None
    in_bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    multipliers: Multipliers = Multipliers()

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_channels(self) -> int:
        """Entries of b, and of c."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        return self.intermediate_size + 2 * self.group_channels

    def build(self, parts: Parts) -> Mamba2:
        return Mamba2(self, parts)


class Mamba2:
    def __init__(self, spec: Mamba2Spec, parts: Parts) -> None:
        parts, size, heads = parts.within(spec.name), spec.intermediate_size, spec.num_heads
        self._spec = spec
        self._ops = parts.ops
        self._layer = parts.keep(
            RecurrentState(conv=(spec.width - 1, spec.channels), ssm=(heads, spec.state_size, spec.head_dim))
        )
        self._inputs = _inputs(spec, parts)
        scales = ((spec.hidden_size, spec.multipliers.output),)
        self._output = parts.linear({"out_proj": spec.hidden_size}, size, bias=spec.out_bias, scales=scales)
        self._kernel = parts.conv_kernel({"conv1d": spec.channels}, spec.width)
        self._kernel_bias = parts.tensor("conv1d.bias", spec.channels) if spec.conv_bias else None
        self._a = parts.decays(heads)
        self._d = parts.tensor("D", heads, float32=True)
        self._dt_bias = parts.tensor("dt_bias", heads, float32=True)
        self._norm = None if spec.norm is None else (spec.norm, parts.tensor("norm.weight", size))

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        spec, ops = self._spec, self._ops
        gate, mixed, dt = torch.split(
            self._inputs(ctx, x), [spec.intermediate_size, spec.channels, spec.num_heads], dim=-1
        )
        state = ctx.cache.state(self._layer)
        mixed = ops.causal_conv(mixed, self._kernel, self._kernel_bias, state.conv, ctx.states, silu=True)
        y, b, c = torch.split(mixed, [spec.intermediate_size, spec.group_channels, spec.group_channels], dim=-1)
        low, high = spec.dt_limit
        scanned = ops.mamba2_scan(
            y.view(len(x), spec.num_heads, spec.head_dim),
            dt,
            self._a,
            b.view(len(x), spec.num_groups, spec.state_size),
            c.view(len(x), spec.num_groups, spec.state_size),
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
            group_size=self._spec.intermediate_size // self._spec.num_groups,
            norm_first=norm.norm_first,
            sigmoid=False,
        )


def _inputs(spec: Mamba2Spec, parts: Parts) -> Linear:
    """The gate, what the convolution runs over (x, b, c), and dt."""
    size, per_group, by = spec.intermediate_size, spec.group_channels, spec.multipliers
    return parts.linear(
        {"in_proj": size + spec.channels + spec.num_heads},
        spec.hidden_size,
        bias=spec.in_bias,
        scales=((size, by.gate), (size, by.x), (per_group, by.b), (per_group, by.c), (spec.num_heads, by.dt)),
        input_scale=by.inputs,
    )
