"""Grouped-query attention over the paged KV cache, with what the supported families add to it.

Shape letters: T tokens, H hidden size, Hq query heads, Hk KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import LinearParam, Rows, TensorParam, linear, rows_of_blocks, vector
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import CacheSpec, FullAttention, SlidingWindow


class QkNorm(StrEnum):
    NONE = "none"
    HEAD = "head"  # each head by itself, weight [D]
    FULL = "full"  # all heads of a token together, weights [Hq * D] and [Hk * D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """`name` is the checkpoint's prefix; `rope` None for no rotary embedding; `sliding_window` 0 for none.

    `scale` 0 stands for head_dim ** -0.5; `norm_offset` is added to the weights of q's and k's norms, whose names end
    in `norm_name`. `sinks`: each head has a logit that takes part in its softmax without a value. `head_gate`: each
    head's output is multiplied by the logistic function of its entry of the layer `gate_proj`. `output_gate`: each
    entry of the output is multiplied by that of its own gate, which `q_proj` has behind each head's q. The input, k and
    the output are multiplied by `input_scale`, `key_scale` and `output_scale`. `interleaved`: the checkpoint has rotary
    pairs as neighbours. `qkv_name`: of the one tensor that holds q, k and v, where there is one.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    rope: RopeSpec | None = None
    sliding_window: int = 0
    scale: float = 0.0
    sinks: bool = False
    head_gate: bool = False
    output_gate: bool = False
    interleaved: bool = False
    qkv_name: str = ""
    output_name: str = "o_proj"
    norm_name: str = "norm"
    input_scale: float = 1.0
    key_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv(self) -> LinearParam:
        """Of q, k, v and, with an `output_gate`, the gates."""
        names = [f"{self.name}.{part}_proj" for part in ("q", "k", "v")]
        q_and_gate = (1 + self.output_gate) * self.q_size
        sizes = [q_and_gate, self.kv_size, self.kv_size]
        scales = ((self.q_size, 1.0), (self.kv_size, self.key_scale), (self.kv_size, 1.0))
        return linear(
            [f"{self.name}.{self.qkv_name}"] if self.qkv_name else names,
            [sum(sizes)] if self.qkv_name else sizes,
            self.hidden_size,
            bias=self.qkv_bias,
            rows=self._gates_last(q_and_gate) if self.output_gate else self._halves() if self.interleaved else (),
            scales=(*scales, (self.q_size, 1.0)) if self.output_gate else scales,
            input_scale=self.input_scale,
        )

    def _gates_last(self, q_and_gate: int) -> Rows:
        q, gates = (
            rows_of_blocks(count=self.num_heads, block=2 * self.head_dim, first=first, size=self.head_dim)
            for first in (0, self.head_dim)
        )
        return (*q, range(q_and_gate, q_and_gate + 2 * self.kv_size), *gates)

    def _halves(self) -> Rows:
        """Halves are paired here: of each head the first of each pair, then the second ones, then what has no angle."""
        assert self.rope is not None, "without rotary embedding there are no pairs"
        heads = range(0, self.q_size + self.kv_size, self.head_dim)
        dim, size = self.rope.dim, self.head_dim
        parts = ((0, dim, 2), (1, dim, 2), (dim, size, 1))
        rotated = (range(head + first, head + stop, step) for head in heads for first, stop, step in parts)
        return (*filter(len, rotated), range(self.q_size + self.kv_size, self.q_size + 2 * self.kv_size))

    @property
    def gate(self) -> LinearParam:
        return linear([f"{self.name}.gate_proj"], [self.num_heads], self.hidden_size, bias=False)

    @property
    def output(self) -> LinearParam:
        names, scales = [f"{self.name}.{self.output_name}"], ((self.hidden_size, self.output_scale),)
        return linear(names, [self.hidden_size], self.q_size, bias=self.o_bias, scales=scales)

    @property
    def norms(self) -> tuple[TensorParam, ...]:
        """Of q and k, where there are any."""
        if self.qk_norm is QkNorm.NONE:
            return ()
        sizes = (self.head_dim, self.head_dim) if self.qk_norm is QkNorm.HEAD else (self.q_size, self.kv_size)
        return tuple(
            vector(f"{self.name}.{part}_{self.norm_name}.weight", size, offset=self.norm_offset)
            for part, size in zip("qk", sizes, strict=True)
        )

    @property
    def sink_logits(self) -> TensorParam:
        return vector(f"{self.name}.sinks", self.num_heads)

    def params(self) -> tuple[TensorParam, ...]:
        gate = self.gate.tensors() if self.head_gate else ()
        sinks = (self.sink_logits,) if self.sinks else ()
        return (*self.qkv.tensors(), *self.output.tensors(), *self.norms, *gate, *sinks)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        kv_heads, head_dim = self.num_kv_heads, self.head_dim
        if self.sliding_window:
            return (SlidingWindow(num_kv_heads=kv_heads, head_dim=head_dim, window=self.sliding_window),)
        return (FullAttention(num_kv_heads=kv_heads, head_dim=head_dim),)

    def build(self, parts: Parts) -> Attention:
        return Attention(self, parts)


class Attention:
    def __init__(self, spec: AttentionSpec, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._ops = parts.ops
        self._qkv = parts.linear(spec.qkv)
        self._output = parts.linear(spec.output)
        self._norms = tuple(weights.tensor(param) for param in spec.norms)
        self._gate = parts.linear(spec.gate) if spec.head_gate else None
        self._attend = PagedAttention(
            parts,
            *spec.cache_specs(),
            scale=spec.scale or spec.head_dim**-0.5,
            rope=spec.rope,
            window=spec.sliding_window,
            sinks=weights.tensor(spec.sink_logits, float32=True) if spec.sinks else None,
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Writes the KV of the step's tokens, then attends over all that the rows have."""
        spec, ops = self._spec, self._ops
        q, k, v, gate = self._project(ctx, x)
        out = self._attend(ctx, q, k, v).flatten(1)
        if spec.output_gate:
            out = ops.mul_sigmoid(out, gate)
        if self._gate is not None:
            out = ops.mul_sigmoid(out, self._gate(ctx, x))
        return self._output(ctx, out)

    def _project(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H] -> q [T, Hq, D], k and v [T, Hk, D], normed where the family does so, and the gates [T, Hq * D]
        where there are any, or [T, 0]."""
        spec, ops = self._spec, self._ops
        gates = spec.q_size if spec.output_gate else 0
        q, k, v, gate = torch.split(self._qkv(ctx, x), [spec.q_size, spec.kv_size, spec.kv_size, gates], dim=-1)
        if spec.qk_norm is QkNorm.FULL:
            q, k = (ops.rms_norm(part, weight, spec.norm_eps) for part, weight in zip((q, k), self._norms, strict=True))
        q = q.view(len(x), spec.num_heads, spec.head_dim)
        k, v = (part.view(len(x), spec.num_kv_heads, spec.head_dim) for part in (k, v))
        if spec.qk_norm is QkNorm.HEAD:
            q, k = (ops.rms_norm(part, weight, spec.norm_eps) for part, weight in zip((q, k), self._norms, strict=True))
        return q, k, v, gate
