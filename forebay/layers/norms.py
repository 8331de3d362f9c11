"""Norms of the residual stream: RMS normalization, or layer normalization (arXiv 1607.06450).

Shape letters: T tokens, H hidden size, N streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.params import TensorParam, vector
from forebay.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormSpec:
    """Layer normalization with `weight` and `bias`, None for no bias."""

    weight: TensorParam
    bias: TensorParam | None = None


NormSpec = TensorParam | LayerNormSpec
"""A `TensorParam` is the weight of an RMS norm."""


class Norm(NamedTuple):
    """A norm with its weights, in two forms."""

    of: Callable[[Tensor], Tensor]  # x [T, H] -> [T, H]
    of_sum: Callable[[Tensor, Tensor], Tensor]  # x and residual -> the norm of their sum, which is the new residual


def layer_norm_spec(name: str, size: int, *, bias: bool) -> LayerNormSpec:
    """Describe a layer normalization under the checkpoint's `name`."""
    return LayerNormSpec(weight=vector(f"{name}.weight", size), bias=vector(f"{name}.bias", size) if bias else None)


def build_norm(spec: NormSpec, parts: Parts, eps: float, *, float32: bool = False) -> Norm:
    """Return the norm with its weights, in the dtype of the model or in float32: that of what is normed."""
    ops, load = parts.ops, partial(parts.weights.tensor, float32=float32)
    if isinstance(spec, TensorParam):
        weight = load(spec)
        return Norm(
            partial(ops.norms.rms_norm, weight=weight, eps=eps), partial(ops.norms.add_rms_norm, weight=weight, eps=eps)
        )
    bias = None if spec.bias is None else load(spec.bias)
    of = partial(ops.norms.layer_norm, weight=load(spec.weight), bias=bias, eps=eps)
    return Norm(of, lambda x, residual: of(ops.elementwise.add_(residual, x)))


def norm_name(norm: NormSpec | None) -> str:
    """Return what equations call a norm."""
    return "layernorm" if isinstance(norm, LayerNormSpec) else "norm"


def norms_of_streams(parts: Parts, name: str, size: int, count: int, offset: float) -> tuple[Tensor, ...]:
    """Load the weight [H] of an RMS norm for each of `count` streams, which are one tensor in files; `offset` is added
    to it."""
    stored = vector(f"{parts.prefix}{name}.weight", count * size, offset=offset)
    return torch.split(parts.weights.tensor(stored), size)


def normed_streams(ops: Ops, streams: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    """streams [T, N * H], each normed by itself with its own weight [H] -> [T, N * H]."""
    each = torch.split(streams, weights[0].shape[0], dim=1)
    return ops.elementwise.concat(
        [ops.norms.rms_norm(stream, weight, eps) for stream, weight in zip(each, weights, strict=True)]
    )
