"""The adapters of a model: which linear layers can have some, and the memory of their matrices, by slot.

Shape letters: N and K a linear layer's outputs and inputs, J layers that a weight joins, r the rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.formats.adapters import Adapter, AdapterPair, Shape
from forebay.formats.quantized import F32
from forebay.layers.params import TensorParam
from forebay.ops.reference.adapters import PANEL, AdapterTable, panels_of
from forebay.ops.weight_memory import WeightMemory

Ints = npt.NDArray[np.int64]

# Below the size from which torch uses threads for a copy. While other processes keep the cores busy, waiting for them
# made a layer of 1,536 outputs take 47 ms instead of 2 (two cores).
_COPY_ELEMENTS: Final = (1 << 15) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSlots:
    """Room for `max_loras` adapters with ranks up to `max_rank`, whose numbers are held in `dtype`: float32 or
    bfloat16. With the latter they are rounded, and take half of the bytes that a step reads."""

    max_loras: int = 4
    max_rank: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the adapters of one layer are: it is the layer number `layer` of those that `param` joins."""

    table: AdapterTable
    param: TensorParam
    layer: int

    @property
    def shape(self) -> Shape:
        return self.param.sizes[self.layer], self.param.inner[0]

    def pack(self, pair: AdapterPair) -> _Packed:
        """Bring A and B into the form of the table; rows of B are reordered and scaled as those of the weight are."""
        layers, rows = _outputs(self.param)
        own, dtype = layers == self.layer, self.table.a.dtype
        outer = pair.outputs()[rows[own] - sum(self.param.sizes[: self.layer])]
        if self.param.scales:
            factors = [np.full(size, factor, np.float32) for size, factor in self.param.scales]
            outer *= np.concatenate(factors)[own, None]
        panels = np.array(panels_of(layers))
        numbers = np.flatnonzero(panels[:, 2] == self.layer)
        padded = np.zeros((len(numbers), pair.rank, PANEL), np.float32)
        padded.swapaxes(1, 2)[np.arange(PANEL) < panels[numbers, 1, None]] = outer
        runs = np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers) != 1) + 1)
        b = tuple((int(numbers[run[0]]), _converted(padded[run], dtype)) for run in runs)
        return _Packed(self, pair.rank, _converted(pair.inputs(), dtype), b)


@dataclass(frozen=True, slots=True)
class _Packed:
    """The adapter of one layer in the form of its table: A [r, K], and B in runs of panels [.., r, PANEL], each with
    the number of its first panel in the table."""

    place: _Place
    rank: int
    a: Tensor
    b: tuple[tuple[int, Tensor], ...]

    def write(self, slot: int) -> None:
        """Copy it into a slot."""
        table, layer = self.place.table, self.place.layer
        _copy(table.a[slot, layer, : self.rank], self.a)
        for first, panels in self.b:
            _copy(table.b[slot, first : first + len(panels), : self.rank], panels)
        table.ranks[slot, layer] = self.rank


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form in which tables of a model hold it. `digest` and `num_bytes` are those of its files."""

    rank: int
    num_bytes: int
    digest: str
    layers: tuple[_Packed, ...]


def _converted(values: F32, dtype: torch.dtype) -> Tensor:
    converted = torch.empty(values.shape, dtype=dtype)
    _copy(converted, torch.from_numpy(values))
    return converted


def _copy(target: Tensor, values: Tensor) -> None:
    """Copy values into `target` in this thread."""
    step = max(1, _COPY_ELEMENTS // values[0].numel())
    for first in range(0, len(values), step):
        target[first : first + step].copy_(values[first : first + step])


class Adapters:
    """The tables of one model, and the adapters in their slots 1..`max_loras`. A slot must not be written or cleared
    while a step in flight refers to it. Slot 0 is that of tokens without an adapter."""

    def __init__(self, slots: AdapterSlots, memory: WeightMemory | None, device: torch.device | str) -> None:
        self.slots = slots
        self._memory, self._device = memory, torch.device(device)
        self._places: dict[str, _Place] = {}
        self.num_bytes = 0

    @property
    def layers(self) -> Mapping[str, Shape]:
        """The shape (N, K) of each layer that can have an adapter, by its name in the checkpoint without `.weight`."""
        return {name: place.shape for name, place in self._places.items()}

    def add(self, param: TensorParam) -> AdapterTable:
        """Make the table of a weight, for the layers that it joins."""
        (num_inputs,), slots, dtype = param.inner, self.slots, self.slots.dtype
        panels = torch.tensor(panels_of(_outputs(param)[0]), dtype=torch.int32)
        count, num_layers = slots.max_loras + 1, len(param.names)
        table = AdapterTable(
            a=self._take(dtype, count, num_layers, slots.max_rank, num_inputs),
            b=self._take(dtype, count, len(panels), slots.max_rank, PANEL),
            ranks=self._take(torch.int32, count, num_layers),
            panels=self._take(torch.int32, *panels.shape),
        )
        if self._device.type != "meta":
            table.panels.copy_(panels)
            for part in (table.a[0], table.b[0], table.ranks):
                part.zero_()
        for layer, name in enumerate(param.names):
            self._places[name.removesuffix(".weight")] = _Place(table, param, layer)
        self.num_bytes += table.num_bytes
        return table

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Bring an adapter of these layers into the form of the tables, in any thread."""
        layers = tuple(self._places[name].pack(pair) for name, pair in adapter.pairs.items())
        return PackedAdapter(adapter.rank, adapter.num_bytes, adapter.digest, layers)

    def write(self, slot: int, packed: PackedAdapter) -> Iterator[None]:
        """Copy an adapter into a slot, and replace the one in it: one layer for each item of the iterator."""
        assert 1 <= slot <= self.slots.max_loras, slot
        self.clear(slot)
        for layer in packed.layers:
            layer.write(slot)
            yield

    def holds(self, slot: int) -> bool:
        """Return whether any layer has an adapter in the slot."""
        return any(bool(place.table.ranks[slot].any()) for place in self._places.values())

    def clear(self, slot: int) -> None:
        """Make a slot one without an adapter."""
        for place in self._places.values():
            place.table.ranks[slot] = 0

    def _take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._memory.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _outputs(param: TensorParam) -> tuple[Ints, Ints]:
    """Return of each output of a weight the layer that it is of, and its row of all that are joined."""
    rows = param.rows or (range(sum(param.sizes)),)
    order = np.concatenate([np.arange(part.start, part.stop, part.step) for part in rows])
    ends = np.cumsum(param.sizes)
    return np.searchsorted(ends, order, side="right"), order
