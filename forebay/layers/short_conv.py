"""The gated short convolution of LFM: a mixer whose whole memory is its last few inputs.

Shape letters: T tokens, H hidden size, W kernel width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import rows_of_heads
from forebay.layers.states import States
from forebay.ops.reference.recurrence import Convolution
from forebay.pools.cache_spec import RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSpec:
    """`width` inputs, the token's own included, reach a token. `bias`: of the convolution and both linear layers."""

    name: str
    hidden_size: int
    width: int
    bias: bool
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> ShortConv:
        return ShortConv(self, parts)


class ShortConv:
    """Gated short convolution of LFM; its state is the last width - 1 inputs."""

    def __init__(self, spec: ShortConvSpec, parts: Parts) -> None:
        parts, size = parts.within(spec.name), spec.hidden_size
        self._ops, self._exchange = parts.ops, parts.share.exchange
        channels = parts.share.of(size, "channels of a convolution")
        self._layer = parts.keep(RecurrentState(conv=(spec.width - 1, len(channels)), inputs=len(channels)))
        block, own = (size, channels, 1), parts.share.part(channels)
        rows = parts.share.part(*rows_of_heads(block, block, block))
        self._inputs = parts.linear({"in_proj": 3 * size}, size, bias=spec.bias, own=rows)
        self._output = parts.gathered("out_proj", size, size, bias=spec.bias)
        kernel = parts.conv_kernel({"conv": size}, spec.width, own)
        bias = parts.tensor("conv.bias", size, own=own) if spec.bias else None
        self._conv = Convolution(kernel, bias, silu=False)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """out(c * conv(b * y)), with b, c and y = in(x): x [T, H] -> [T, H]."""
        ops = self._ops
        b, c, y = self._inputs(ctx, x).chunk(3, dim=-1)
        state = ctx.cache.state(self._layer).conv
        mixed = States.of(ctx).run(ops.recurrence.causal_conv, ops.elementwise.mul(b, y), self._conv, state)
        return self._output(ctx, self._exchange.gather(ops.elementwise.mul(c, mixed)))
