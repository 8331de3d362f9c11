"""The Mamba-1 mixer: a linear layer, a short convolution, a selective scan, a gate, and a linear layer.

Mamba, arXiv 2312.00752, section 3. Shape letters: T tokens, H hidden size, I intermediate size, D state size, R rank of
dt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from forebay.families.base.mixers import Mamba1Mixer
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import rows_of_heads
from forebay.layers.states import States
from forebay.ops.reference.recurrence import Convolution, Scan
from forebay.pools.cache_spec import RecurrentState


class ScanNorm(StrEnum):
    """An RMS norm each of dt (in its rank), b and c."""

    NONE = "none"
    PLAIN = "plain"  # without weights
    WEIGHTED = "weighted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Spec:
    """Sizes and tensor names of a Mamba-1 mixer."""

    name: str
    hidden_size: int
    mixer: Mamba1Mixer
    norm: ScanNorm = ScanNorm.NONE
    norm_eps: float = 1e-6
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Mamba1:
        return Mamba1(self, parts)


class Mamba1:
    """Mamba-1 mixer; x [T, H] -> [T, H]."""

    def __init__(self, spec: Mamba1Spec, parts: Parts) -> None:
        parts, mixer = parts.within(spec.name), spec.mixer
        size, state_size, rank = mixer.intermediate_size, mixer.state_size, mixer.dt_rank
        channels = parts.share.of(size, "channels of a recurrence")
        own, num_own = parts.share.part(channels), len(channels)
        self._spec = spec
        self._ops, self._exchange = parts.ops, parts.share.exchange
        inputs, conv = 4 * num_own + rank + 2 * state_size, (mixer.width - 1, num_own)
        self._layer = parts.keep(RecurrentState(conv=conv, ssm=(num_own, state_size), inputs=inputs))
        block = (size, channels, 1)
        rows = parts.share.part(*rows_of_heads(block, block))  # of the inputs, and of the gate
        self._inputs = parts.linear({"in_proj": 2 * size}, spec.hidden_size, bias=mixer.bias, own=rows)
        self._selection = parts.linear({"x_proj": rank + 2 * state_size}, size)
        self._dt = parts.linear({"dt_proj": size}, rank, own=own)  # its bias is added in the scan, in float32
        self._output = parts.gathered("out_proj", spec.hidden_size, size, bias=mixer.bias)
        kernel = parts.conv_kernel({"conv1d": size}, mixer.width, own)
        bias = parts.tensor("conv1d.bias", size, own=own) if mixer.conv_bias else None
        self._conv = Convolution(kernel, bias, silu=True)
        a, d = parts.decays(size, state_size, own=own), parts.tensor("D", size, float32=True, own=own)
        self._scan = Scan(a, d, parts.tensor("dt_proj.bias", size, float32=True, own=own))
        self._norms = _norms(spec, parts, kernel)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        ops, state = self._ops, ctx.cache.state(self._layer)
        mixed, gate = self._inputs(ctx, x).chunk(2, dim=-1)
        mixed = States.of(ctx).run(ops.recurrence.causal_conv, mixed, self._conv, state.conv)
        dt, b, c = self._select(ctx, self._exchange.gather(mixed))
        y = States.of(ctx).run(ops.recurrence.mamba1_scan, mixed, self._dt(ctx, dt), b, c, self._scan, state.ssm)
        return self._output(ctx, self._exchange.gather(ops.elementwise.mul_silu(y, gate)))

    def _select(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, I] -> dt in its rank [T, R], b and c [T, D], normed if the family norms them."""
        mixer, eps = self._spec.mixer, self._spec.norm_eps
        parts = torch.split(self._selection(ctx, x), [mixer.dt_rank, mixer.state_size, mixer.state_size], dim=-1)
        if self._norms:
            parts = tuple(self._ops.norms.rms_norm(part, w, eps) for part, w in zip(parts, self._norms, strict=True))
        dt, b, c = parts
        return dt, b, c


def _norms(spec: Mamba1Spec, parts: Parts, like: Tensor) -> tuple[Tensor, ...]:
    """The weights for dt, b and c, `like` another tensor if the checkpoint has none."""
    if spec.norm is ScanNorm.NONE:
        return ()
    sizes = {"dt": spec.mixer.dt_rank, "b": spec.mixer.state_size, "c": spec.mixer.state_size}
    if spec.norm is ScanNorm.PLAIN:
        return tuple(like.new_ones(size) for size in sizes.values())
    return tuple(parts.tensor(f"{part}_layernorm.weight", size) for part, size in sizes.items())
