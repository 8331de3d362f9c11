"""Kimi delta attention: the gated delta rule with a decay for each channel of a key, and a logistic output gate.

Kimi Linear, arXiv 2510.26692, section 3. Shape letters: T tokens, H hidden size, Hv heads, D their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import LinearParam, TensorParam, linear, tensor, vector
from forebay.pools.cache_spec import CacheSpec, RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaSpec:
    """`width` inputs, the token's own included, reach a token through the convolution over q, k and v.

    `low_rank`: decays and gates come from D dimensions that each of them takes of the input. `a_log_shape` is the
    checkpoint's, with one entry for each head. Decays are kept between `lowest_log_decay` and 0 by a logistic function,
    or, where that is 0, below 0 by a softplus.
    """

    name: str
    hidden_size: int
    num_heads: int
    head_dim: int
    width: int
    norm_eps: float
    low_rank: bool
    a_log_shape: tuple[int, ...]
    lowest_log_decay: float = 0.0
    output_name: str = "o_proj"

    @property
    def size(self) -> int:
        """Of q, k or v of all heads."""
        return self.num_heads * self.head_dim

    @property
    def gate_rank(self) -> int:
        """What the first layer gives for decays, and for gates."""
        return self.head_dim if self.low_rank else self.size

    @property
    def inputs(self) -> LinearParam:
        """Of q, k, v, decays, gates and rates."""
        decay, gate = ("f_a_proj", "g_a_proj") if self.low_rank else ("f_proj", "g_proj")
        names = [f"{self.name}.{part}" for part in ("q_proj", "k_proj", "v_proj", decay, gate, "b_proj")]
        sizes = [self.size] * 3 + [self.gate_rank] * 2 + [self.num_heads]
        return linear(names, sizes, self.hidden_size, bias=False)

    @property
    def second_layers(self) -> tuple[LinearParam, ...]:
        """Of decays and gates, where these are of low rank."""
        if not self.low_rank:
            return ()
        decay, gate = (
            linear([f"{self.name}.{part}"], [self.size], self.head_dim, bias=False) for part in ("f_b_proj", "g_b_proj")
        )
        return decay, gate

    @property
    def output(self) -> LinearParam:
        return linear([f"{self.name}.{self.output_name}"], [self.hidden_size], self.size, bias=False)

    @property
    def kernel(self) -> TensorParam:
        names = tuple(f"{self.name}.{part}_conv1d.weight" for part in "qkv")
        return TensorParam(names=names, sizes=(self.size,) * 3, inner=(1, self.width))

    @property
    def a_log(self) -> TensorParam:
        return tensor(f"{self.name}.A_log", *self.a_log_shape)

    @property
    def dt_bias(self) -> TensorParam:
        return vector(f"{self.name}.dt_bias", self.size)

    @property
    def norm_weight(self) -> TensorParam:
        return vector(f"{self.name}.o_norm.weight", self.head_dim)

    def params(self) -> tuple[TensorParam, ...]:
        layers = (self.inputs, *self.second_layers, self.output)
        own = (self.kernel, self.a_log, self.dt_bias, self.norm_weight)
        return (*(param for layer in layers for param in layer.tensors()), *own)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        ssm = (self.num_heads, self.head_dim, self.head_dim)
        return (RecurrentState(conv=(self.width - 1, 3 * self.size), ssm=ssm),)

    def build(self, parts: Parts) -> KimiDelta:
        return KimiDelta(self, parts)


class KimiDelta:
    def __init__(self, spec: KimiDeltaSpec, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._ops = parts.ops
        self._layer = parts.keep(*spec.cache_specs())
        self._inputs = parts.linear(spec.inputs)
        self._second_layers = tuple(parts.linear(layer) for layer in spec.second_layers)
        self._output = parts.linear(spec.output)
        self._kernel = weights.tensor(spec.kernel).squeeze(1).T.contiguous()
        rate = weights.tensor(spec.a_log, float32=True).flatten().exp().repeat_interleave(spec.head_dim)
        bounded = spec.lowest_log_decay != 0
        self._decay = torch.full_like(rate, spec.lowest_log_decay) if bounded else -rate
        self._rate = rate if bounded else None
        self._dt_bias = weights.tensor(spec.dt_bias, float32=True)
        self._norm = weights.tensor(spec.norm_weight)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Reads and writes the states of the step's sequences."""
        spec, ops, rank = self._spec, self._ops, self._spec.gate_rank
        mixed, decay, gate, beta = torch.split(
            self._inputs(ctx, x), [3 * spec.size, rank, rank, spec.num_heads], dim=-1
        )
        if self._second_layers:
            decay, gate = (layer(ctx, y) for layer, y in zip(self._second_layers, (decay, gate), strict=True))
        state = ctx.cache.state(self._layer)
        mixed = ops.causal_conv(mixed, self._kernel, None, state.conv, ctx.states, silu=True)
        heads = (len(x), spec.num_heads, spec.head_dim)
        q, k, v = (part.view(heads) for part in mixed.chunk(3, dim=-1))
        log_decay, beta = ops.delta_gates(decay, beta, self._decay, self._dt_bias, self._rate)
        out = ops.gated_delta_rule(
            q,
            k,
            v,
            log_decay.view(heads),
            beta,
            state.ssm,
            ctx.states,
            scale=spec.head_dim**-0.5,
        )
        normed = ops.gated_rms_norm(
            out.flatten(1),
            gate,
            self._norm,
            spec.norm_eps,
            group_size=spec.head_dim,
            norm_first=True,
            sigmoid=True,
        )
        return self._output(ctx, normed)
