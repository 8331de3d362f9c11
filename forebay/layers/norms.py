"""Norms of the residual stream: RMS normalization, or layer normalization (arXiv 1607.06450).

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.params import TensorParam, vector


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


def build_norm(spec: NormSpec, parts: Parts, eps: float) -> Norm:
    """Return the norm with its weights."""
    ops, weights = parts.ops, parts.weights
    if isinstance(spec, TensorParam):
        weight = weights.tensor(spec)
        return Norm(
            partial(ops.norms.rms_norm, weight=weight, eps=eps), partial(ops.norms.add_rms_norm, weight=weight, eps=eps)
        )
    bias = None if spec.bias is None else weights.tensor(spec.bias)
    of = partial(ops.norms.layer_norm, weight=weights.tensor(spec.weight), bias=bias, eps=eps)
    return Norm(of, lambda x, residual: of(ops.elementwise.add_(residual, x)))


def norm_name(norm: NormSpec | None) -> str:
    """Return what equations call a norm."""
    return "layernorm" if isinstance(norm, LayerNormSpec) else "norm"
