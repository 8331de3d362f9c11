"""Multi-head latent attention: all heads share one short vector per token, and the cache keeps nothing else.

DeepSeek-V2, arXiv 2405.04434, section 2.1, in the absorbed form: keys and values of the heads are never made. A head's
query is taken to where the latent vectors are, and so is what it reads from there back to its values.

Shape letters: T tokens, H hidden size, Hq heads, N dimensions of a head's key without and R with positions, C of the
latent vector, Dv of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import LinearParam, Rows, TensorParam, linear, rows_of_blocks, vector
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import CacheSpec, LatentAttention

_NORM_EPS = 1e-6  # of the norms of both latent vectors, whatever the rest of a model has: as in transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """N is `nope_dim`, R `rope_dim`, C `rank`, Dv `value_dim`. Queries come from a latent vector, too, of `q_rank`
    dimensions, or straight from the input where that is 0.

    `rope` None: the R dimensions are not rotated. `interleaved`: the checkpoint has rotary pairs as neighbours.
    `bias`: of the layers from the input to latent vectors, and of the output. `head_gate`: each head's output is
    multiplied by the logistic function of its entry of the layer `g_proj`.
    """

    name: str
    hidden_size: int
    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    q_rank: int
    scale: float
    rope: RopeSpec | None
    interleaved: bool
    bias: bool = False
    head_gate: bool = False
    output_name: str = "o_proj"

    @property
    def q_layers(self) -> tuple[LinearParam, ...]:
        """From the input to q, of all heads first N dimensions each, then R each."""
        size = self.nope_dim + self.rope_dim
        nope = rows_of_blocks(count=self.num_heads, block=size, first=0, size=self.nope_dim)
        rope = (rows for head in range(self.num_heads) for rows in self._rotary_rows(head * size + self.nope_dim))
        rows, sizes = (*nope, *rope), [self.num_heads * size]
        if not self.q_rank:
            return (linear([f"{self.name}.q_proj"], sizes, self.hidden_size, bias=False, rows=rows),)
        return (
            linear([f"{self.name}.q_a_proj"], [self.q_rank], self.hidden_size, bias=self.bias),
            linear([f"{self.name}.q_b_proj"], sizes, self.q_rank, bias=False, rows=rows),
        )

    @property
    def kv_layer(self) -> LinearParam:
        """From the input to the latent vector and the R dimensions that all heads' keys share."""
        rows = (range(self.rank), *self._rotary_rows(self.rank))
        names, sizes = [f"{self.name}.kv_a_proj_with_mqa"], [self.rank + self.rope_dim]
        return linear(names, sizes, self.hidden_size, bias=self.bias, rows=rows)

    def _rotary_rows(self, first: int) -> Rows:
        """Halves are paired here: the first of each pair, then the second ones."""
        stop = first + self.rope_dim
        return (range(first, stop, 2), range(first + 1, stop, 2)) if self.interleaved else (range(first, stop),)

    @property
    def expansion(self) -> TensorParam:
        """From the latent vector to each head's key and value: [Hq * (N + Dv), C]."""
        rows = self.num_heads * (self.nope_dim + self.value_dim)
        return TensorParam(names=(f"{self.name}.kv_b_proj.weight",), sizes=(rows,), inner=(self.rank,))

    @property
    def gate(self) -> LinearParam:
        return linear([f"{self.name}.g_proj"], [self.num_heads], self.hidden_size, bias=False)

    @property
    def output(self) -> LinearParam:
        size = self.num_heads * self.value_dim
        return linear([f"{self.name}.{self.output_name}"], [self.hidden_size], size, bias=self.bias)

    @property
    def norms(self) -> tuple[TensorParam, ...]:
        """Of the latent vector of keys and values, and of that of queries where there is one."""
        kv = vector(f"{self.name}.kv_a_layernorm.weight", self.rank)
        return (kv, vector(f"{self.name}.q_a_layernorm.weight", self.q_rank)) if self.q_rank else (kv,)

    def params(self) -> tuple[TensorParam, ...]:
        layers = (*self.q_layers, self.kv_layer, self.output, *((self.gate,) if self.head_gate else ()))
        return (*(param for layer in layers for param in layer.tensors()), self.expansion, *self.norms)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (LatentAttention(rank=self.rank, rope_dim=self.rope_dim),)

    def build(self, parts: Parts) -> LatentAttentionLayer:
        return LatentAttentionLayer(self, parts)


class LatentAttentionLayer:
    def __init__(self, spec: LatentAttentionSpec, parts: Parts) -> None:
        ops, weights = parts.ops, parts.weights
        self._spec = spec
        self._ops = ops
        self._attend = PagedAttention(parts, *spec.cache_specs(), scale=spec.scale)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)
        self._q_layers = tuple(parts.linear(layer) for layer in spec.q_layers)
        self._kv_layer = parts.linear(spec.kv_layer)
        self._output = parts.linear(spec.output)
        self._gate = parts.linear(spec.gate) if spec.head_gate else None
        self._norms = tuple(weights.tensor(norm) for norm in spec.norms)
        heads = weights.tensor(spec.expansion).view(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank)
        self._into_latent = ops.pack_heads([ops.pack_linear(head[: spec.nope_dim].T.contiguous()) for head in heads])
        self._out_of_latent = ops.pack_heads([ops.pack_linear(head[spec.nope_dim :].contiguous()) for head in heads])

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Writes the latent vectors of the step's tokens, then attends over all of the rows'."""
        ops = self._ops
        q_nope, q_rope = self._queries(ctx, x)
        latent, k_rope = self._keys(ctx, x)
        if self._cos_sin is not None:
            ops.apply_rope(q_rope, k_rope, ctx.positions, self._cos_sin)
        q = ops.concat([ops.linear_heads(q_nope, self._into_latent), q_rope])
        read = self._attend(ctx, q, ops.concat([latent, k_rope]), latent)
        out = ops.linear_heads(read, self._out_of_latent).flatten(1)
        if self._gate is not None:
            out = ops.mul_sigmoid(out, self._gate(ctx, x))
        return self._output(ctx, out)

    def _queries(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> [T, Hq, N] and [T, Hq, R]."""
        spec, ops = self._spec, self._ops
        q = self._q_layers[0](ctx, x)
        if spec.q_rank:
            q = self._q_layers[1](ctx, ops.rms_norm(q, self._norms[1], _NORM_EPS))
        nope, rope = torch.split(q, [spec.num_heads * spec.nope_dim, spec.num_heads * spec.rope_dim], dim=-1)
        return nope.view(len(x), spec.num_heads, spec.nope_dim), rope.view(len(x), spec.num_heads, spec.rope_dim)

    def _keys(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the latent vectors [T, 1, C] and what all heads' keys have besides [T, 1, R]."""
        spec, ops = self._spec, self._ops
        latent, rope = torch.split(self._kv_layer(ctx, x), [spec.rank, spec.rope_dim], dim=-1)
        return ops.rms_norm(latent, self._norms[0], _NORM_EPS).unsqueeze(1), rope.unsqueeze(1)
