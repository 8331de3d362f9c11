"""The weights that a model needs, found by building it without any: its layers ask for each weight at its use.

Tensors of the device `meta` stand for the weights: shapes, which can be viewed, split and joined. Nothing is computed
with them (see `Change`): the first such computation would take a second, in which torch imports its compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.formats.adapters import Shape
from forebay.layers.adapters import AdapterSlots
from forebay.layers.params import Change, TensorParam, Weights, unchanged
from forebay.models.network import Network, NetworkSpec, build_network
from forebay.ops import LinearWeight, Ops
from forebay.ops.exchange import WHOLE, Share
from forebay.ops.reference.tables import RowTable
from forebay.pools.cache_spec import CacheSpec

_MOST_ELEMENTS = 1 << 56  # torch counts bytes in 63 bits


@dataclass(frozen=True, slots=True)
class Needs:
    """All weights, each once, and what each block keeps, in the order of the `CachePool`'s entries. `adaptable` are the
    shapes (N, K) of layers that can have adapters, by name, and `adapter_bytes` what the slots of these take; nothing
    without slots."""

    params: tuple[TensorParam, ...]
    kept_by_block: tuple[tuple[CacheSpec, ...], ...]
    adaptable: Mapping[str, Shape]
    adapter_bytes: int

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return tuple(spec for kept in self.kept_by_block for spec in kept)


def dry_build(spec: NetworkSpec, adapters: AdapterSlots | None = None, share: Share = WHOLE) -> Needs:
    """Reads nothing and takes no memory for weights. ModelError where there could be no such tensor, ConfigError where
    ranks cannot have such a `share`."""
    built: list[Network] = []
    params = asked_by(
        lambda ops, weights: built.append(
            build_network(spec, ops, weights, num_positions=1, adapters=adapters, share=share)
        )
    )
    (model,) = built
    if model.adapters is None:
        return Needs(params, model.kept_by_block, {}, 0)
    return Needs(params, model.kept_by_block, model.adapters.layers, model.adapters.num_bytes)


def asked_by(build: Callable[[Ops, Weights], object]) -> tuple[TensorParam, ...]:
    """Return the weights that a build asks for, each once."""
    shapes = _Shapes()
    build(make_ops("torch", 1), shapes)
    return tuple(shapes.asked)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    in_features: int
    out_features: int


class _Shapes:
    """`Weights` without values, which record the requested weights."""

    dtype = torch.float32
    device = torch.device("meta")
    held_bytes: Mapping[str, int] = {}
    numbers: Sequence[float] = ()

    def __init__(self) -> None:
        self.asked: list[TensorParam] = []

    def tensor(self, param: TensorParam, *, float32: bool = False, change: Change = unchanged) -> Tensor:
        if param.num_elements > _MOST_ELEMENTS:
            raise ModelError(f"{param.names[0]} would have {param.num_elements:,} entries: no machine holds that")
        self.asked.append(param)
        return torch.empty(param.shape, device=self.device)

    def values(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        return self.tensor(param, float32=float32)

    def number(self, param: TensorParam) -> float:
        self.asked.append(param)
        return 1.0

    def linear(self, weight: TensorParam, bias: TensorParam | None) -> LinearWeight:
        self.asked += [weight] if bias is None else [weight, bias]
        out_features, in_features = weight.shape
        return _Unpacked(in_features, out_features)

    def row_table(self, param: TensorParam) -> RowTable:
        (width,) = param.inner
        return RowTable(places=self.tensor(param), part_rows=max(param.sizes), width=width)

    def table(self, param: TensorParam) -> Tensor:
        return self.tensor(param)
