"""From the description of layers to layers: what every part is built with, and what it has to offer.

A spec is a frozen value that says what a part is; `build` makes the part, which asks `Parts` for its weights and says
what it keeps of the tokens it has seen. What a whole model needs is so known from a build without weights
(`forebay.models.dry_build`), before one is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from forebay.layers.adapters import Adapters
from forebay.layers.context import ForwardContext
from forebay.layers.linear import GatheredLinear, Linear
from forebay.layers.params import Change, Rows, Scales, TensorParam, Weights, unchanged
from forebay.layers.rotary import RopeSpec, RopeTables
from forebay.ops import Ops
from forebay.ops.exchange import WHOLE, Share
from forebay.pools.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True)
class Parts:
    """Inputs of layer construction, passed from one layer to the next. Names of weights are those of the checkpoint
    behind `prefix`; the caches of the layers, `kept`, are the entries of the `CachePool` from number `first` on. Linear
    layers can have `adapters`; None if none can. `share` is the rank's part of the model."""

    ops: Ops
    weights: Weights
    ropes: RopeTables
    kept: list[CacheSpec] = field(default_factory=list)
    prefix: str = ""
    first: int = 0
    adapters: Adapters | None = None
    share: Share = WHOLE

    @property
    def without_adapters(self) -> Parts:
        """A copy for layers that cannot have adapters: those whose weights are used otherwise than by `Linear`, or
        shared."""
        return replace(self, adapters=None)

    def within(self, name: str) -> Parts:
        """Return a copy for the parts of `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(
        self,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        rows: Rows = (),
        scales: Scales = (),
        input_scale: float = 1.0,
        min_bits: int = 4,
        own: Rows = (),
    ) -> Linear:
        """Layers by name (`.weight` and `.bias` are added) and number of outputs, one below the other, or `rows` of
        them. The input is multiplied by `input_scale`, and runs of outputs by `scales`. A rank has the outputs `own` of
        them; () for all."""
        scales = scales or ((sum(map(len, rows)) if rows else sum(outputs.values()), 1.0),)
        by_input = tuple((size, factor * input_scale) for size, factor in scales)
        weight = self._joined(outputs, "weight", (in_features,), rows, by_input, min_bits, own=own)
        of_bias = self._joined(outputs, "bias", (), rows, scales, own=own) if bias else None
        adapters = None if self.adapters is None else self.adapters.add(weight)
        return Linear(self.ops, self.weights.linear(weight, of_bias), adapters)

    def gathered(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, scale: float = 1.0
    ) -> GatheredLinear:
        """Build one layer below this prefix, whose outputs are multiplied by `scale`. A rank has a run of the outputs,
        and all ranks get all of them."""
        own = self.share.part(self.share.of(out_features, f"outputs of {self.prefix}{name}"))
        scales = ((out_features, scale),)
        layer = self.linear({name: out_features}, in_features, bias=bias, scales=scales, own=own)
        return GatheredLinear(layer, self.share.exchange)

    def tensor(
        self,
        name: str,
        *shape: int,
        offset: float = 0.0,
        float32: bool = False,
        change: Change = unchanged,
        own: Rows = (),
    ) -> Tensor:
        """Load the tensor `name` below this prefix, of the given shape, or the entries `own` of it."""
        param = TensorParam(names=(self.prefix + name,), sizes=shape[:1], inner=shape[1:], offset=offset, own=own)
        return self.weights.tensor(param, float32=float32, change=change)

    def stacked(self, names: Iterable[str], size: int, own: Rows = ()) -> Tensor:
        """Load vectors of the same size, one below the other, [N, size], or the vectors `own` of them."""
        names = tuple(f"{self.prefix}{name}" for name in names)
        entries = tuple(range(run.start * size, run.stop * size) for run in own)
        param = TensorParam(names=names, sizes=(size,) * len(names), own=entries)
        return self.weights.tensor(param, change=lambda values: values.view(-1, size))

    def values(self, name: str, *shape: int, own: Rows = ()) -> Tensor:
        """To be packed, and not kept; the rows `own`, () for all."""
        return self.weights.values(TensorParam(names=(self.prefix + name,), sizes=shape[:1], inner=shape[1:], own=own))

    def number(self, name: str, *, bare: bool = False) -> float:
        """A weight that is one number; 1 if there are only shapes. `bare` as in `TensorParam`."""
        return self.weights.number(TensorParam(names=(self.prefix + name,), sizes=(1,), bare=bare))

    def bound(self, name: str) -> Tensor:
        """Load one number that values are held within, perhaps an infinity: [1]."""
        return self.weights.tensor(TensorParam(names=(self.prefix + name,), sizes=(1,), bound=True, bare=True))

    def ones(self, size: int) -> Tensor:
        """For a norm without a weight."""
        return torch.ones(size, dtype=self.weights.dtype, device=self.weights.device)

    def decays(self, *shape: int, own: Rows = ()) -> Tensor:
        """A = -exp(A_log), float32."""
        return self.tensor("A_log", *shape, float32=True, change=lambda a_log: -a_log.exp(), own=own)

    def conv_kernel(self, channels: Mapping[str, int], width: int, own: Rows = ()) -> Tensor:
        """Return the kernel of causal convolutions, given by name (`.weight` is added) and number of channels, one
        behind the other, or of the channels `own`: [W, C]."""
        kernel = self._joined(channels, "weight", (1, width), own=own)
        return self.weights.tensor(kernel, change=lambda kernel: kernel.squeeze(1).T.contiguous())

    def rope(self, spec: RopeSpec) -> Tensor:
        """Return the cos/sin table of the rotary embedding, shared by all layers with an equal spec."""
        return self.ropes.table(spec)

    def rope_axes(self, spec: RopeSpec) -> Tensor | None:
        """Return which of a token's positions each frequency has the angle of, as the rotary ops take it; None without
        M-RoPE."""
        return self.ropes.axes(spec)

    def keep(self, spec: CacheSpec) -> int:
        """Say what a mixer keeps; its number in the `CachePool`."""
        self.kept.append(spec)
        return self.first + len(self.kept) - 1

    def _joined(
        self,
        sizes: Mapping[str, int],
        kind: str,
        inner: tuple[int, ...],
        rows: Rows = (),
        scales: Scales = (),
        min_bits: int = 16,
        *,
        own: Rows = (),
    ) -> TensorParam:
        names = tuple(f"{self.prefix}{name}.{kind}" for name in sizes)
        scales = scales if any(factor != 1.0 for _, factor in scales) else ()
        sized = tuple(sizes.values())
        return TensorParam(names=names, sizes=sized, inner=inner, rows=rows, own=own, scales=scales, min_bits=min_bits)


class Part(Protocol):
    """Mixes tokens (attention, a recurrence, or both), or transforms each by itself. x [T, H] -> [T, H], which the
    caller may change."""

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor: ...


class PartSpec(Protocol):
    """Description of a part of a layer: sizes and tensor names, no weights."""

    def build(self, parts: Parts) -> Part:
        """Return the part with its weights, which are loaded through `parts`."""


class Block(Protocol):
    """A decoder layer."""

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        """Add x, what the layer before returned, to the residual stream in place; return what the next one has to add.

        Both are [T, H], or with N streams [T, N * H]. Each addition can so share a pass with the norm that follows it.
        """
        ...


class BlockSpec(Protocol):
    """One decoder layer."""

    def build(self, parts: Parts) -> Block:
        """Return the layer with its weights, which are loaded through `parts`."""
