"""Multi-head latent attention: all heads share one short vector per token, and the cache keeps nothing else.

DeepSeek-V2, arXiv 2405.04434, section 2.1, in the absorbed form: W_UK is absorbed into the queries and W_UV into the
output, so that no head's keys and values are ever made.

Shape letters: T tokens, H hidden size, Hq heads, N dimensions of a head's key without and R with positions, C of the
latent vector, Dv of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import Rows, rows_of_blocks
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import LatentAttention

_NORM_EPS = 1e-6  # of the norms of both latent vectors, whatever the rest of a model has: as in transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """N is `nope_dim`, R `rope_dim`, C `rank`, Dv `value_dim`. Queries come from a latent vector, too, of `q_rank`
    dimensions, or straight from the input where that is 0.

    `rope` None: the R dimensions are not rotated. `interleaved`: the checkpoint has rotary pairs as neighbours.
    `bias`: of the layers from the input to latent vectors, and of the output. `head_gate`: each head's output is
    multiplied by sigmoid(g_proj(x)).
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

    def build(self, parts: Parts) -> LatentAttentionLayer:
        return LatentAttentionLayer(self, parts)


class LatentAttentionLayer:
    def __init__(self, spec: LatentAttentionSpec, parts: Parts) -> None:
        parts, ops = parts.within(spec.name), parts.ops
        self._spec = spec
        self._ops = ops
        self._attend = PagedAttention(parts, LatentAttention(rank=spec.rank, rope_dim=spec.rope_dim), scale=spec.scale)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)
        self._q_layers = _q_layers(spec, parts)
        self._kv_layer = parts.linear(
            {"kv_a_proj_with_mqa": spec.rank + spec.rope_dim},
            spec.hidden_size,
            bias=spec.bias,
            rows=(range(spec.rank), *_rotary_rows(spec, spec.rank)),
        )
        self._output = parts.linear(
            {spec.output_name: spec.hidden_size}, spec.num_heads * spec.value_dim, bias=spec.bias
        )
        self._gate = parts.linear({"g_proj": spec.num_heads}, spec.hidden_size) if spec.head_gate else None
        size = spec.nope_dim + spec.value_dim
        expansion = parts.tensor("kv_b_proj.weight", spec.num_heads * size, spec.rank)
        heads = expansion.view(spec.num_heads, size, spec.rank)
        keys, values = torch.split(heads, [spec.nope_dim, spec.value_dim], dim=1)
        self._into_latent = ops.pack_heads([ops.pack_linear(head) for head in keys.transpose(1, 2).contiguous()])
        self._out_of_latent = ops.pack_heads([ops.pack_linear(head) for head in values])
        self._kv_norm = parts.tensor("kv_a_layernorm.weight", spec.rank)
        self._q_norm = parts.tensor("q_a_layernorm.weight", spec.q_rank) if spec.q_rank else None

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
        if self._q_norm is not None:
            q = self._q_layers[1](ctx, ops.rms_norm(q, self._q_norm, _NORM_EPS))
        nope, rope = torch.split(q, [spec.num_heads * spec.nope_dim, spec.num_heads * spec.rope_dim], dim=-1)
        return nope.view(len(x), spec.num_heads, spec.nope_dim), rope.view(len(x), spec.num_heads, spec.rope_dim)

    def _keys(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the latent vectors [T, 1, C] and what all heads' keys have besides [T, 1, R]."""
        spec, ops = self._spec, self._ops
        latent, rope = torch.split(self._kv_layer(ctx, x), [spec.rank, spec.rope_dim], dim=-1)
        return ops.rms_norm(latent, self._kv_norm, _NORM_EPS).unsqueeze(1), rope.unsqueeze(1)


def _q_layers(spec: LatentAttentionSpec, parts: Parts) -> tuple[Linear, ...]:
    """From the input to q, of all heads first N dimensions each, then R each."""
    heads, size = spec.num_heads, spec.nope_dim + spec.rope_dim
    nope = rows_of_blocks(count=heads, block=size, first=0, size=spec.nope_dim)
    rows = (*nope, *(rows for head in range(heads) for rows in _rotary_rows(spec, head * size + spec.nope_dim)))
    if not spec.q_rank:
        return (parts.linear({"q_proj": heads * size}, spec.hidden_size, rows=rows),)
    return (
        parts.linear({"q_a_proj": spec.q_rank}, spec.hidden_size, bias=spec.bias),
        parts.linear({"q_b_proj": heads * size}, spec.q_rank, rows=rows),
    )


def _rotary_rows(spec: LatentAttentionSpec, first: int) -> Rows:
    """Halves are paired here: the first of each pair, then the second ones."""
    stop = first + spec.rope_dim
    return (range(first, stop, 2), range(first + 1, stop, 2)) if spec.interleaved else (range(first, stop),)
