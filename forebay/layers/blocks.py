"""A decoder layer: attention and a feed-forward layer around the residual stream, with norms before or after them.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from forebay.layers.attention import Attention, AttentionSpec
from forebay.layers.context import ForwardContext
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.params import TensorParam, Weights
from forebay.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """`kind` is the class that `build` makes: where the norms stand."""

    kind: type[PreNormBlock] | type[PostNormBlock]
    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    attention_norm: TensorParam
    mlp_norm: TensorParam
    norm_eps: float

    def params(self) -> tuple[TensorParam, ...]:
        return (*self.attention.params(), *self.mlp.params(), self.attention_norm, self.mlp_norm)

    def build(self, ops: Ops, weights: Weights, cos_sin: Tensor) -> Block:
        return self.kind(self, ops, weights, cos_sin)


class Block(ABC):
    def __init__(self, spec: BlockSpec, ops: Ops, weights: Weights, cos_sin: Tensor) -> None:
        self._ops = ops
        self._eps = spec.norm_eps
        self._attention = Attention(spec.attention, ops, weights, cos_sin)
        self._mlp = spec.mlp.build(ops, weights)
        self._attention_norm = weights.tensor(spec.attention_norm)
        self._mlp_norm = weights.tensor(spec.mlp_norm)

    @abstractmethod
    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        """Add x, what the layer before returned, to the residual stream in place; return what the next one has to add.

        Both are [T, H]. Each addition can so share a pass with the norm that follows it.
        """


class PreNormBlock(Block):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        x = self._attention(ctx, ops.add_rms_norm(x, residual, self._attention_norm, self._eps))
        return self._mlp(ctx, ops.add_rms_norm(x, residual, self._mlp_norm, self._eps))


class PostNormBlock(Block):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        residual.add_(x)
        residual.add_(ops.rms_norm(self._attention(ctx, residual), self._attention_norm, self._eps))
        return ops.rms_norm(self._mlp(ctx, residual), self._mlp_norm, self._eps)
