"""A transformer block whose weights several layers use, each with adapters and a KV cache of its own (Zamba 2).

Zamba 2, arXiv 2411.15242, section 2. Shape letters: T tokens, H hidden size, I intermediate size, Hq query heads, Hk KV
heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import FullAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTransformerSpec:
    """The part that all uses share. The block's input is 2H wide; no residual goes around its parts."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    mlp_bias: bool
    norm_eps: float
    rope: RopeSpec | None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output sizes of the query, key and value projections."""
        kv_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_size, kv_size


@dataclass(frozen=True, kw_only=True, slots=True)
class UseSpec:
    """One use of a shared block, the `number`-th of all. `output` is the name of the linear layer behind it.

    Adapters, which add a product of two thin matrices to a shared one, have the rank `rank`; `on_attention`: q, k and v
    have some, too.
    """

    shared: SharedTransformerSpec
    number: int
    output_name: str
    rank: int
    on_attention: bool


class SharedTransformer:
    """The shared weights."""

    def __init__(self, spec: SharedTransformerSpec, parts: Parts) -> None:
        parts, size, inner = parts.within(spec.name).without_adapters, spec.hidden_size, spec.intermediate_size
        self.spec = spec
        attention, mlp = parts.within("self_attn"), parts.within("feed_forward")
        qkv = dict(zip(("q_proj", "k_proj", "v_proj"), spec.qkv_sizes, strict=True))
        self.qkv = attention.linear(qkv, 2 * size)
        self.output = attention.linear({"o_proj": size}, spec.qkv_sizes[0])
        self.gate_up = mlp.linear({"gate_up_proj": 2 * inner}, size, bias=spec.mlp_bias)
        self.down = mlp.linear({"down_proj": size}, inner, bias=spec.mlp_bias)
        self.input_norm = parts.tensor("input_layernorm.weight", 2 * size)
        self.mlp_norm = parts.tensor("pre_ff_layernorm.weight", size)


class Use:
    """One layer's use of a shared block: adapters and KV cache are its own."""

    def __init__(self, spec: UseSpec, shared: SharedTransformer, parts: Parts) -> None:
        of, size = spec.shared, spec.shared.hidden_size
        self._ops = parts.ops
        self._shared = shared
        cache = FullAttention(num_kv_heads=of.num_kv_heads, head_dim=of.head_dim)
        self._attend = PagedAttention(parts, parts.keep(cache), scale=(of.head_dim / 2) ** -0.5, rope=of.rope)
        self._mlp_adapter = _adapter(spec, parts, "feed_forward.gate_up_proj", size, 2 * of.intermediate_size)
        qkv = zip("qkv", of.qkv_sizes, strict=True) if spec.on_attention else ()
        self._attention_adapters = [
            _adapter(spec, parts, f"self_attn.linear_{part}", 2 * size, outputs) for part, outputs in qkv
        ]
        self._output = parts.linear({spec.output_name: size}, size)

    def __call__(self, ctx: ForwardContext, x: Tensor, embedded: Tensor) -> Tensor:
        """x [T, H] and the embeddings that the first layer began with, [T, H] -> [T, H]."""
        ops, shared = self._ops, self._shared
        eps = shared.spec.norm_eps
        x = self._attention(ctx, ops.norms.rms_norm(ops.elementwise.concat([x, embedded]), shared.input_norm, eps))
        x = ops.norms.rms_norm(x, shared.mlp_norm, eps)
        into, out_of = self._mlp_adapter
        gate_up = ops.elementwise.add_(shared.gate_up(ctx, x), out_of(ctx, into(ctx, x)))
        return self._output(ctx, shared.down(ctx, ops.elementwise.gelu_and_mul(gate_up, exact=True)))

    def _attention(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, 2H] -> [T, H]. Scores are scaled as if heads were half as long."""
        ops, shared, spec = self._ops, self._shared, self._shared.spec
        qkv = shared.qkv(ctx, x)
        if self._attention_adapters:
            added = [out_of(ctx, into(ctx, x)) for into, out_of in self._attention_adapters]
            ops.elementwise.add_(qkv, ops.elementwise.concat(added))
        q, k, v = (part.view(len(x), -1, spec.head_dim) for part in torch.split(qkv, list(spec.qkv_sizes), dim=-1))
        return shared.output(ctx, self._attend(ctx, q, k, v).flatten(1))


def _adapter(spec: UseSpec, parts: Parts, of: str, inputs: int, outputs: int) -> tuple[Linear, Linear]:
    """From the inputs to the rank, and from there to the outputs."""
    parts = parts.within(f"{spec.shared.name}.{of}_adapter_list.{spec.number}").without_adapters
    return parts.linear({"0": spec.rank}, inputs), parts.linear({"1": outputs}, spec.rank)
