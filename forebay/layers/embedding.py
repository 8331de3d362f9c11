"""Rows of tables: what a token is to the model, and, where layers have inputs of their own, to each of these.

Shape letters: T tokens, H hidden size, L layers, P entries of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from forebay.formats.quantized import HEAD_BITS
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import TensorParam
from forebay.ops import LinearWeight


def embedding_table(name: str, num_tokens: int, size: int) -> TensorParam:
    """Declare an embedding table [V, H], stored with at least `HEAD_BITS` bits."""
    return TensorParam(names=(name,), sizes=(num_tokens,), inner=(size,), min_bits=HEAD_BITS)


def lookup(parts: Parts, table: Tensor | LinearWeight, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """ids [T] -> their rows of a table of `Weights`, [T, H], in the dtype of the model or in float32."""
    dtype = dtype or parts.weights.dtype
    if isinstance(table, Tensor):
        return partial(parts.ops.linear.embedding, table=table, dtype=dtype)
    return partial(parts.ops.linear.embedding_packed, table=table, dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerInputsSpec:
    """Per-layer embeddings: for each layer `size` entries of a token's own row of a table and, normed, as many of a
    projection of its embedding (Gemma 3n, Gemma 4; as transformers has them)."""

    table: TensorParam
    projection: str
    norm: TensorParam
    norm_eps: float
    hidden_size: int
    for_ranks: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.norm.sizes[0]

    def build(self, parts: Parts) -> PerLayerInputs:
        return PerLayerInputs(self, parts)


class PerLayerInputs:
    """Lookup of the inputs that each layer gets beside the residual stream (Gemma 3n, Gemma 4)."""

    def __init__(self, spec: PerLayerInputsSpec, parts: Parts) -> None:
        self._ops, self._spec = parts.ops, spec
        (width,) = spec.table.inner
        self._num_layers = width // spec.size
        self._lookup = lookup(parts, parts.weights.table(spec.table))
        self._project = parts.linear({spec.projection: width}, spec.hidden_size)
        self._norm = parts.weights.tensor(spec.norm)

    def __call__(self, ctx: ForwardContext, input_ids: Tensor, x: Tensor) -> Tensor:
        """input_ids [T] and their embeddings x [T, H] -> [T, L * P]."""
        ops, spec = self._ops, self._spec
        # The projection is to be divided by sqrt(H): to a norm that is the same as H times its epsilon.
        projected = self._project(ctx, x).view(len(x), self._num_layers, spec.size)
        normed = ops.norms.rms_norm(projected, self._norm, spec.norm_eps * spec.hidden_size).flatten(1)
        own = ops.elementwise.scale_(self._lookup(input_ids), spec.size**0.5)
        return ops.elementwise.scale_(ops.elementwise.add_(own, normed), 2**-0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerGateSpec:
    """A gate that adds part of the per-layer input, its `layer`-th `size` entries: W (gelu(Wg x) p)."""

    name: str
    layer: int
    size: int
    hidden_size: int
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> PerLayerGate:
        return PerLayerGate(self, parts)


class PerLayerGate:
    """Gate of one layer over its own per-layer inputs."""

    def __init__(self, spec: PerLayerGateSpec, parts: Parts) -> None:
        parts, self._ops = parts.within(spec.name), parts.ops
        self._own = slice(spec.layer * spec.size, (spec.layer + 1) * spec.size)
        self._gate = parts.linear({"per_layer_input_gate": spec.size}, spec.hidden_size)
        self._output = parts.linear({"per_layer_projection": spec.hidden_size}, spec.size)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        assert ctx.per_layer is not None, "a step without per-layer inputs"
        opened = self._ops.elementwise.concat([self._gate(ctx, x), ctx.per_layer[:, self._own]])
        return self._output(ctx, self._ops.elementwise.gelu_and_mul(opened))
