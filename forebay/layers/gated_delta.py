"""The gated delta net: a linear layer, a short convolution, the gated delta rule, a gated norm, and a linear layer.

Gated Delta Networks, arXiv 2412.06464, section 3. Shape letters: T tokens, H hidden size, Hk key heads, Hv value heads,
Dk and Dv their sizes, C channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, Rows, TensorParam, linear, vector
from forebay.pools.cache_spec import CacheSpec, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaSpec:
    """`width` inputs, the token's own included, reach a token through the convolution over q, k and v.

    `inputs` are the checkpoint's names, behind `name`, of the linear layers whose outputs are, in this order: q, k, v,
    the gate, the rates (beta) and the decays; `input_rows` where they are in another. `kernels` are the names of the
    convolutions of q, k and v, or that of the one over all. Rates go from 0 to `most_beta`.
    """

    name: str
    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    width: int
    norm_eps: float
    inputs: Sequence[tuple[str, int]]
    input_rows: Rows = ()
    kernels: Sequence[str] = ("conv1d",)
    norm_name: str = "norm"
    output_name: str = "out_proj"
    most_beta: float = 1.0

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def input_layer(self) -> LinearParam:
        names = [f"{self.name}.{name}" for name, _ in self.inputs]
        sizes = [size for _, size in self.inputs]
        return linear(names, sizes, self.hidden_size, bias=False, rows=self.input_rows)

    @property
    def output_layer(self) -> LinearParam:
        return linear([f"{self.name}.{self.output_name}"], [self.hidden_size], self.value_size, bias=False)

    @property
    def kernel(self) -> TensorParam:
        sizes = (self.channels,) if len(self.kernels) == 1 else (self.key_size, self.key_size, self.value_size)
        names = tuple(f"{self.name}.{name}.weight" for name in self.kernels)
        return TensorParam(names=names, sizes=sizes, inner=(1, self.width))

    @property
    def per_head(self) -> tuple[TensorParam, TensorParam]:
        a_log, dt_bias = (vector(f"{self.name}.{part}", self.num_value_heads) for part in ("A_log", "dt_bias"))
        return a_log, dt_bias

    @property
    def norm_weight(self) -> TensorParam:
        return vector(f"{self.name}.{self.norm_name}.weight", self.value_head_dim)

    def params(self) -> tuple[TensorParam, ...]:
        layers = (*self.input_layer.tensors(), *self.output_layer.tensors())
        return (*layers, self.kernel, *self.per_head, self.norm_weight)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        ssm = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (RecurrentState(conv=(self.width - 1, self.channels), ssm=ssm),)

    def build(self, parts: Parts) -> GatedDelta:
        return GatedDelta(self, parts)


class GatedDelta:
    def __init__(self, spec: GatedDeltaSpec, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._ops = parts.ops
        self._layer = parts.keep(*spec.cache_specs())
        self._inputs = parts.linear(spec.input_layer)
        self._output = parts.linear(spec.output_layer)
        self._kernel = weights.tensor(spec.kernel).squeeze(1).T.contiguous()
        a_log, self._dt_bias = (weights.tensor(param, float32=True) for param in spec.per_head)
        self._decay = -a_log.exp()
        self._norm = weights.tensor(spec.norm_weight)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        spec, ops, tokens = self._spec, self._ops, len(x)
        heads, key_heads = spec.num_value_heads, spec.num_key_heads
        mixed, gate, beta, decay = torch.split(
            self._inputs(ctx, x), [spec.channels, spec.value_size, heads, heads], dim=-1
        )
        state = ctx.cache.state(self._layer)
        mixed = ops.causal_conv(mixed, self._kernel, None, state.conv, ctx.states, silu=True)
        log_decay, beta = ops.delta_gates(decay, beta, self._decay, self._dt_bias, most_beta=spec.most_beta)
        q, k, v = torch.split(mixed, [spec.key_size, spec.key_size, spec.value_size], dim=-1)
        out = ops.gated_delta_rule(
            q.view(tokens, key_heads, spec.key_head_dim),
            k.view(tokens, key_heads, spec.key_head_dim),
            v.view(tokens, heads, spec.value_head_dim),
            log_decay,
            beta,
            state.ssm,
            ctx.states,
            scale=spec.key_head_dim**-0.5,
        )
        normed = ops.gated_rms_norm(
            out.flatten(1),
            gate,
            self._norm,
            spec.norm_eps,
            group_size=spec.value_head_dim,
            norm_first=True,
            sigmoid=False,
        )
        return self._output(ctx, normed)
