"""The Mamba-2 mixer: a linear layer, a short convolution, a state-space scan, a gate, and a linear layer.

Mamba-2, arXiv 2405.21060, section 7. Shape letters: T tokens, H hidden size, I intermediate size, G groups, D state
size, C channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forebay.families.base.mixers import Mamba2Mixer
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.params import Rows, rows_of_heads
from forebay.layers.states import States
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.recurrence import Convolution, Scan
from forebay.pools.cache_spec import RecentInputs, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Factors by which a family multiplies the input, the parts of the first linear layer's output, and the mixer's
    output by."""

    inputs: float = 1.0
    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedNormSpec:
    """An RMS norm of each group, before (`norm_first`) or after the gate."""

    eps: float
    norm_first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec:
    """`norm` None for a gate alone."""

    name: str
    hidden_size: int
    mixer: Mamba2Mixer
    norm: GatedNormSpec | None
    multipliers: Multipliers = Multipliers()
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Mamba2:
        return Mamba2(self, parts)


class Mamba2:
    """Mamba-2 mixer; x [T, H] -> [T, H]."""

    def __init__(self, spec: Mamba2Spec, parts: Parts) -> None:
        parts, share, whole = parts.within(spec.name), parts.share, spec.mixer
        own, groups = share.of(whole.num_heads, "heads"), share.with_copies(whole.num_groups, "groups of heads")
        mixer = replace(whole, num_heads=len(own), num_groups=len(groups))
        heads, channels = mixer.num_heads, mixer.channels
        self._ops, self._mixer, self._exchange = parts.ops, mixer, share.exchange
        self._cuts_groups = share.size > whole.num_groups
        ssm = (heads, mixer.state_size, mixer.head_dim)
        inputs = mixer.intermediate_size + 2 * channels + heads
        recent = RecentInputs(model=(mixer.intermediate_size, mixer.group_channels, heads))
        conv = (mixer.width - 1, channels)
        self._layer = parts.keep(RecurrentState(conv=conv, ssm=ssm, inputs=inputs, recent=recent))
        of_heads, of_groups = (whole.num_heads, own, whole.head_dim), (whole.num_groups, groups, whole.state_size)
        mixed = share.part(*rows_of_heads(of_heads, of_groups, of_groups))
        rows = rows_of_heads(of_heads, of_heads, of_groups, of_groups, (whole.num_heads, own, 1))
        self._inputs = _inputs(spec, parts, share.part(*rows))
        size, scale = whole.intermediate_size, spec.multipliers.output
        self._output = parts.gathered("out_proj", spec.hidden_size, size, bias=whole.out_bias, scale=scale)
        kernel = parts.conv_kernel({"conv1d": whole.channels}, whole.width, mixed)
        bias = parts.tensor("conv1d.bias", whole.channels, own=mixed) if whole.conv_bias else None
        self._conv = Convolution(kernel, bias, silu=True)
        a = parts.decays(whole.num_heads, own=share.part(own))
        d, dt_bias = (
            parts.tensor(name, whole.num_heads, float32=True, own=share.part(own)) for name in ("D", "dt_bias")
        )
        self._scan = Scan(a, d, dt_bias, whole.dt_limit)
        self._norm = _norm(spec, parts, () if self._cuts_groups else share.part(*rows[:1]))

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        mixer, ops = self._mixer, self._ops
        sizes = [mixer.intermediate_size, mixer.channels, mixer.num_heads]
        gate, mixed, dt = torch.split(self._inputs(ctx, x), sizes, dim=-1)
        state = ctx.cache.state(self._layer)
        mixed = States.of(ctx).run(ops.recurrence.causal_conv, mixed, self._conv, state.conv)
        y, b, c = torch.split(mixed, [mixer.intermediate_size, mixer.group_channels, mixer.group_channels], dim=-1)
        y = y.view(len(x), mixer.num_heads, mixer.head_dim)
        b, c = (part.view(len(x), mixer.num_groups, mixer.state_size) for part in (b, c))
        y = States.of(ctx).run(ops.recurrence.mamba2_scan, y, dt, b, c, self._scan, state.ssm).flatten(1)
        return self._output(ctx, self._gated(y, gate))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate y [T, I], a rank's part of it, and norm it; returns those of all ranks. A group that several ranks have
        is gathered before its norm."""
        gather, ops = self._exchange.gather, self._ops
        if self._norm is None:
            return gather(ops.elementwise.mul_silu(y, gate))
        if self._cuts_groups:
            return ops.norms.gated_rms_norm(gather(y), gather(gate), self._norm)
        return gather(ops.norms.gated_rms_norm(y, gate, self._norm))


def _norm(spec: Mamba2Spec, parts: Parts, own: Rows) -> GatedNorm | None:
    if spec.norm is None:
        return None
    size = spec.mixer.intermediate_size
    weight = parts.tensor("norm.weight", size, own=own)
    return GatedNorm(weight, spec.norm.eps, size // spec.mixer.num_groups, spec.norm.norm_first)


def _inputs(spec: Mamba2Spec, parts: Parts, own: Rows) -> Linear:
    """The gate, what the convolution runs over (x, b, c), and dt."""
    mixer, by = spec.mixer, spec.multipliers
    size, per_group, heads = mixer.intermediate_size, mixer.group_channels, mixer.num_heads
    return parts.linear(
        {"in_proj": size + mixer.channels + heads},
        spec.hidden_size,
        bias=mixer.bias,
        scales=((size, by.gate), (size, by.x), (per_group, by.b), (per_group, by.c), (heads, by.dt)),
        input_scale=by.inputs,
        own=own,
    )
