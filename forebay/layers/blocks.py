"""Decoder layers: a mixer and a feed-forward layer around the residual stream, with norms before or after them.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Block, Parts, PartSpec
from forebay.layers.context import ForwardContext
from forebay.layers.params import TensorParam


@dataclass(frozen=True, kw_only=True, slots=True)
class PreNormSpec:
    """x += m * mixer(norm(x)); x += m * mlp(norm(x)), m the `residual_multiplier`."""

    mixer: PartSpec
    mlp: PartSpec
    mixer_norm: TensorParam
    mlp_norm: TensorParam
    norm_eps: float
    residual_multiplier: float = 1.0

    def build(self, parts: Parts) -> Block:
        return PreNormBlock(self, parts)


class PreNormBlock:
    def __init__(self, spec: PreNormSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._eps = spec.norm_eps
        self._multiplier = spec.residual_multiplier
        self._mixer = spec.mixer.build(parts)
        self._mlp = spec.mlp.build(parts)
        self._mixer_norm = parts.weights.tensor(spec.mixer_norm)
        self._mlp_norm = parts.weights.tensor(spec.mlp_norm)

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        x = self._scaled(self._mixer(ctx, ops.add_rms_norm(x, residual, self._mixer_norm, self._eps)))
        return self._scaled(self._mlp(ctx, ops.add_rms_norm(x, residual, self._mlp_norm, self._eps)))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._multiplier == 1.0 else self._ops.scale_(x, self._multiplier)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleSpec:
    """x += mixer(norm(x)): a layer that is a mixer or a feed-forward layer alone."""

    mixer: PartSpec
    norm: TensorParam
    norm_eps: float

    def build(self, parts: Parts) -> Block:
        return SingleBlock(self, parts)


class SingleBlock:
    def __init__(self, spec: SingleSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._eps = spec.norm_eps
        self._mixer = spec.mixer.build(parts)
        self._norm = parts.weights.tensor(spec.norm)

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        return self._mixer(ctx, self._ops.add_rms_norm(x, residual, self._norm, self._eps))


@dataclass(frozen=True, kw_only=True, slots=True)
class PostNormSpec:
    """x += norm(mixer(x)); x += norm(mlp(x))."""

    mixer: PartSpec
    mlp: PartSpec
    mixer_norm: TensorParam
    mlp_norm: TensorParam
    norm_eps: float

    def build(self, parts: Parts) -> Block:
        return PostNormBlock(self, parts)


class PostNormBlock:
    def __init__(self, spec: PostNormSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._eps = spec.norm_eps
        self._mixer = spec.mixer.build(parts)
        self._mlp = spec.mlp.build(parts)
        self._mixer_norm = parts.weights.tensor(spec.mixer_norm)
        self._mlp_norm = parts.weights.tensor(spec.mlp_norm)

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        ops.add_(residual, x)
        ops.add_(residual, ops.rms_norm(self._mixer(ctx, residual), self._mixer_norm, self._eps))
        return ops.rms_norm(self._mlp(ctx, residual), self._mlp_norm, self._eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichSpec:
    """x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))."""

    mixer: PartSpec
    mlp: PartSpec
    mixer_norms: tuple[TensorParam, TensorParam]
    mlp_norms: tuple[TensorParam, TensorParam]
    norm_eps: float

    def build(self, parts: Parts) -> Block:
        return SandwichBlock(self, parts)


class SandwichBlock:
    def __init__(self, spec: SandwichSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._eps = spec.norm_eps
        self._mixer = spec.mixer.build(parts)
        self._mlp = spec.mlp.build(parts)
        self._mixer_norms = tuple(parts.weights.tensor(param) for param in spec.mixer_norms)
        self._mlp_norms = tuple(parts.weights.tensor(param) for param in spec.mlp_norms)

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops, eps = self._ops, self._eps
        before, after = self._mixer_norms
        x = ops.rms_norm(self._mixer(ctx, ops.add_rms_norm(x, residual, before, eps)), after, eps)
        before, after = self._mlp_norms
        return ops.rms_norm(self._mlp(ctx, ops.add_rms_norm(x, residual, before, eps)), after, eps)
