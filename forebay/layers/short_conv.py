"""The gated short convolution of LFM: a mixer whose whole memory is its last few inputs.

Shape letters: T tokens, H hidden size, W kernel width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, TensorParam, linear, tensor, vector
from forebay.pools.cache_spec import CacheSpec, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSpec:
    """`width` inputs, the token's own included, reach a token. `bias`: of the convolution and both linear layers."""

    name: str
    hidden_size: int
    width: int
    bias: bool

    @property
    def inputs(self) -> LinearParam:
        return linear([f"{self.name}.in_proj"], [3 * self.hidden_size], self.hidden_size, bias=self.bias)

    @property
    def output(self) -> LinearParam:
        return linear([f"{self.name}.out_proj"], [self.hidden_size], self.hidden_size, bias=self.bias)

    @property
    def kernel(self) -> TensorParam:
        return tensor(f"{self.name}.conv.weight", self.hidden_size, 1, self.width)

    @property
    def kernel_bias(self) -> TensorParam:
        return vector(f"{self.name}.conv.bias", self.hidden_size)

    def params(self) -> tuple[TensorParam, ...]:
        bias = (self.kernel_bias,) if self.bias else ()
        return (*self.inputs.tensors(), *self.output.tensors(), self.kernel, *bias)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (RecurrentState(conv=(self.width - 1, self.hidden_size)),)

    def build(self, parts: Parts) -> ShortConv:
        return ShortConv(self, parts)


class ShortConv:
    def __init__(self, spec: ShortConvSpec, parts: Parts) -> None:
        weights = parts.weights
        self._ops = parts.ops
        self._layer = parts.keep(*spec.cache_specs())
        self._inputs = parts.linear(spec.inputs)
        self._output = parts.linear(spec.output)
        self._kernel = weights.tensor(spec.kernel).squeeze(1).T.contiguous()
        self._bias = weights.tensor(spec.kernel_bias) if spec.bias else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """out(c * conv(b * y)), with b, c and y = in(x): x [T, H] -> [T, H]."""
        ops = self._ops
        b, c, y = self._inputs(ctx, x).chunk(3, dim=-1)
        state = ctx.cache.state(self._layer).conv
        mixed = ops.causal_conv(ops.mul(b, y), self._kernel, self._bias, state, ctx.states, silu=False)
        return self._output(ctx, ops.mul(c, mixed))
