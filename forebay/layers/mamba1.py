"""The Mamba-1 mixer: a linear layer, a short convolution, a selective scan, a gate, and a linear layer.

Mamba, arXiv 2312.00752, section 3. Shape letters: T tokens, H hidden size, I intermediate size, D state size, R rank of
the step widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, TensorParam, linear, tensor, vector
from forebay.pools.cache_spec import CacheSpec, RecurrentState


class ScanNorm(StrEnum):
    """An RMS norm of each of the step widths (in their rank), b and c."""

    NONE = "none"
    PLAIN = "plain"  # without weights
    WEIGHTED = "weighted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Spec:
    """`width` inputs, the token's own included, reach a token through the convolution. `bias`: of the first and the
    last linear layer."""

    name: str
    hidden_size: int
    intermediate_size: int
    state_size: int
    rank: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    norm: ScanNorm = ScanNorm.NONE
    norm_eps: float = 1e-6

    @property
    def inputs(self) -> LinearParam:
        """What the convolution runs over, and the gate."""
        return linear([f"{self.name}.in_proj"], [2 * self.intermediate_size], self.hidden_size, bias=self.bias)

    @property
    def selection(self) -> LinearParam:
        """From a token's x to its step widths' rank, b and c."""
        size = self.rank + 2 * self.state_size
        return linear([f"{self.name}.x_proj"], [size], self.intermediate_size, bias=False)

    @property
    def steps(self) -> LinearParam:
        """Without its bias, which is added in the scan, in float32."""
        return linear([f"{self.name}.dt_proj"], [self.intermediate_size], self.rank, bias=False)

    @property
    def output(self) -> LinearParam:
        return linear([f"{self.name}.out_proj"], [self.hidden_size], self.intermediate_size, bias=self.bias)

    @property
    def kernel(self) -> TensorParam:
        return tensor(f"{self.name}.conv1d.weight", self.intermediate_size, 1, self.width)

    @property
    def kernel_bias(self) -> TensorParam:
        return vector(f"{self.name}.conv1d.bias", self.intermediate_size)

    @property
    def per_channel(self) -> tuple[TensorParam, TensorParam, TensorParam]:
        """Of the scan: the logarithms of its decays [I, D], what passes it by [I], and the step widths' bias [I]."""
        return (
            tensor(f"{self.name}.A_log", self.intermediate_size, self.state_size),
            vector(f"{self.name}.D", self.intermediate_size),
            vector(f"{self.name}.dt_proj.bias", self.intermediate_size),
        )

    @property
    def norm_weights(self) -> tuple[TensorParam, ...]:
        if self.norm is not ScanNorm.WEIGHTED:
            return ()
        sizes = {"dt": self.rank, "b": self.state_size, "c": self.state_size}
        return tuple(vector(f"{self.name}.{part}_layernorm.weight", size) for part, size in sizes.items())

    def params(self) -> tuple[TensorParam, ...]:
        layers = (self.inputs, self.selection, self.steps, self.output)
        bias = (self.kernel_bias,) if self.conv_bias else ()
        tensors = (param for layer in layers for param in layer.tensors())
        return (*tensors, self.kernel, *bias, *self.per_channel, *self.norm_weights)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        size = self.intermediate_size
        return (RecurrentState(conv=(self.width - 1, size), ssm=(size, self.state_size)),)

    def build(self, parts: Parts) -> Mamba1:
        return Mamba1(self, parts)


class Mamba1:
    def __init__(self, spec: Mamba1Spec, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._ops = parts.ops
        self._layer = parts.keep(*spec.cache_specs())
        self._inputs, self._selection, self._steps, self._output = (
            parts.linear(layer) for layer in (spec.inputs, spec.selection, spec.steps, spec.output)
        )
        self._kernel = weights.tensor(spec.kernel).squeeze(1).T.contiguous()
        self._kernel_bias = weights.tensor(spec.kernel_bias) if spec.conv_bias else None
        a_log, self._d, self._dt_bias = (weights.tensor(param, float32=True) for param in spec.per_channel)
        self._a = -a_log.exp()
        self._norms = tuple(weights.tensor(param) for param in spec.norm_weights)
        if spec.norm is ScanNorm.PLAIN:
            self._norms = tuple(self._kernel.new_ones(size) for size in (spec.rank, spec.state_size, spec.state_size))

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        ops, state = self._ops, ctx.cache.state(self._layer)
        mixed, gate = self._inputs(ctx, x).chunk(2, dim=-1)
        mixed = ops.causal_conv(mixed, self._kernel, self._kernel_bias, state.conv, ctx.states, silu=True)
        steps, b, c = self._select(ctx, mixed)
        y = ops.mamba1_scan(
            mixed, self._steps(ctx, steps), self._a, b, c, self._d, self._dt_bias, state.ssm, ctx.states
        )
        return self._output(ctx, ops.mul_silu(y, gate))

    def _select(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, I] -> the step widths in their rank [T, R], b and c [T, D], normed where the family does so."""
        spec, ops = self._spec, self._ops
        parts = torch.split(self._selection(ctx, x), [spec.rank, spec.state_size, spec.state_size], dim=-1)
        if self._norms:
            parts = tuple(
                ops.rms_norm(part, weight, spec.norm_eps) for part, weight in zip(parts, self._norms, strict=True)
            )
        steps, b, c = parts
        return steps, b, c
