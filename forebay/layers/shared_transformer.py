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
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import LinearParam, TensorParam, linear, vector
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import CacheSpec, FullAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTransformerSpec:
    """What all uses have in common. The block's input is 2H wide; no residual goes around its parts."""

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
        kv_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_size, kv_size

    @property
    def qkv(self) -> LinearParam:
        names = [f"{self.name}.self_attn.{part}_proj" for part in "qkv"]
        return linear(names, self.qkv_sizes, 2 * self.hidden_size, bias=False)

    @property
    def output(self) -> LinearParam:
        return linear([f"{self.name}.self_attn.o_proj"], [self.hidden_size], self.qkv_sizes[0], bias=False)

    @property
    def gate_up(self) -> LinearParam:
        name = f"{self.name}.feed_forward.gate_up_proj"
        return linear([name], [2 * self.intermediate_size], self.hidden_size, bias=self.mlp_bias)

    @property
    def down(self) -> LinearParam:
        name = f"{self.name}.feed_forward.down_proj"
        return linear([name], [self.hidden_size], self.intermediate_size, bias=self.mlp_bias)

    @property
    def norms(self) -> tuple[TensorParam, TensorParam]:
        """Of the block's input, and of the MLP's."""
        return (
            vector(f"{self.name}.input_layernorm.weight", 2 * self.hidden_size),
            vector(f"{self.name}.pre_ff_layernorm.weight", self.hidden_size),
        )

    def params(self) -> tuple[TensorParam, ...]:
        layers = (self.qkv, self.output, self.gate_up, self.down)
        return (*(param for layer in layers for param in layer.tensors()), *self.norms)


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

    @property
    def adapters(self) -> tuple[tuple[LinearParam, LinearParam], ...]:
        """Of gate and up, then of q, k and v: from the inputs to the rank, and from there to the outputs."""
        of, size = self.shared, self.shared.hidden_size
        found = [self._adapter("feed_forward.gate_up_proj_adapter_list", size, 2 * of.intermediate_size)]
        if self.on_attention:
            names = (f"self_attn.linear_{part}_adapter_list" for part in "qkv")
            found += [self._adapter(name, 2 * size, outputs) for name, outputs in zip(names, of.qkv_sizes, strict=True)]
        return tuple(found)

    def _adapter(self, name: str, inputs: int, outputs: int) -> tuple[LinearParam, LinearParam]:
        name = f"{self.shared.name}.{name}.{self.number}"
        return (
            linear([f"{name}.0"], [self.rank], inputs, bias=False),
            linear([f"{name}.1"], [outputs], self.rank, bias=False),
        )

    @property
    def output(self) -> LinearParam:
        size = self.shared.hidden_size
        return linear([self.output_name], [size], size, bias=False)

    def params(self) -> tuple[TensorParam, ...]:
        """Without those of the shared block."""
        adapters = (param for pair in self.adapters for layer in pair for param in layer.tensors())
        return (*adapters, *self.output.tensors())

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (FullAttention(num_kv_heads=self.shared.num_kv_heads, head_dim=self.shared.head_dim),)


class SharedTransformer:
    """The shared weights."""

    def __init__(self, spec: SharedTransformerSpec, parts: Parts) -> None:
        weights = parts.weights
        self.spec = spec
        self.qkv, self.output, self.gate_up, self.down = (
            parts.linear(layer) for layer in (spec.qkv, spec.output, spec.gate_up, spec.down)
        )
        self.input_norm, self.mlp_norm = (weights.tensor(param) for param in spec.norms)


class Use:
    def __init__(self, spec: UseSpec, shared: SharedTransformer, parts: Parts) -> None:
        self._ops = parts.ops
        self._shared = shared
        of = spec.shared
        self._attend = PagedAttention(parts, *spec.cache_specs(), scale=(of.head_dim / 2) ** -0.5, rope=of.rope)
        self._output = parts.linear(spec.output)
        self._mlp_adapter, *self._attention_adapters = (
            (parts.linear(into), parts.linear(out_of)) for into, out_of in spec.adapters
        )

    def __call__(self, ctx: ForwardContext, x: Tensor, embedded: Tensor) -> Tensor:
        """x [T, H] and the embeddings that the first layer began with, [T, H] -> [T, H]."""
        ops, shared = self._ops, self._shared
        eps = shared.spec.norm_eps
        x = self._attention(ctx, ops.rms_norm(ops.concat([x, embedded]), shared.input_norm, eps))
        x = ops.rms_norm(x, shared.mlp_norm, eps)
        into, out_of = self._mlp_adapter
        gate_up = ops.add_(shared.gate_up(ctx, x), out_of(ctx, into(ctx, x)))
        return self._output(ctx, shared.down(ctx, ops.gelu_and_mul(gate_up, exact=True)))

    def _attention(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, 2H] -> [T, H]. Scores are scaled as if heads were half as long."""
        ops, shared, spec = self._ops, self._shared, self._shared.spec
        qkv = shared.qkv(ctx, x)
        if self._attention_adapters:
            added = [out_of(ctx, into(ctx, x)) for into, out_of in self._attention_adapters]
            ops.add_(qkv, ops.concat(added))
        q, k, v = (part.view(len(x), -1, spec.head_dim) for part in torch.split(qkv, list(spec.qkv_sizes), dim=-1))
        return shared.output(ctx, self._attend(ctx, q, k, v).flatten(1))
