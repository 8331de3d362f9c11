"""The bytes of all that layers keep: KV pages, window pages and recurrent states, from the layers' specs (C5, C6).

Index 0 of each is nobody's: writes that must go nowhere go to page 0 or slot 0, and no live row reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.config.engine_config import CacheTypes
from forebay.memory.slots import PAD
from forebay.ops.attention import KvCache
from forebay.pools.cache_spec import CacheSpec, LatentAttention, Per, RecurrentState, cache_sizes
from forebay.pools.regions import Take
from forebay.pools.table import Column, Region, Table


class StateLayer(NamedTuple):
    """Per slot, `[slots + 1, ...]`: the convolution's last inputs, and the scan's state.
    Empty where there is none."""

    conv: Tensor
    ssm: Tensor


class WindowPages(Table):
    """Row p is about page p; `full_to_window` is its window page, or NO_SLOT where the windows have moved past it."""

    full_to_window = Column(torch.int32, pad=PAD)


class CachePool:
    """By kind of cache a table of its pages or slots, with the columns of all layers; a layer knows its own number.

    `num_slots` are without the padding page or slot; of kinds that it does not name there is nothing else. Where layers
    have windows, which have fewer pages, `full_to_window` says where a page's is. Their memory comes from `take`, None:
    from torch.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        types: CacheTypes,
        *,
        page_size: int,
        num_slots: Mapping[str, int],
        device: torch.device | str,
        take: Take | None = None,
    ) -> None:
        self.specs, self.page_size = tuple(specs), page_size
        where: dict[str, Any] = {"device": device, "take": take}
        columns: dict[Per, dict[str, Column]] = {per: {} for per in Per}
        for layer, spec in enumerate(self.specs):
            for name, per, shape, dtype in spec.columns(types):
                shape = shape if per is Per.SLOT else (page_size, *shape)
                columns[per][f"{layer}.{name}"] = Column(getattr(torch, dtype), shape, pad=0)
        # With the padding page or slot.
        self.num_ids: dict[str, int] = {per: num_slots.get(per, 0) + 1 for per in Per}
        self.tables: dict[str, Table] = {per: Table(self.num_ids[per], columns=columns[per], **where) for per in Per}
        # Of a sequence's tokens so many are read, the next among them; where no number is, all.
        kinds = cache_sizes(self.specs, types).kinds
        self.num_read: dict[str, int] = {name: size.num_read for name, size in kinds.items()}
        windows = self.has(Per.WINDOW_TOKEN)
        self.full_to_window = WindowPages(self.num_ids[Per.TOKEN], **where).full_to_window if windows else None
        self._layers: list[KvCache | StateLayer] = []
        for layer, spec in enumerate(self.specs):
            of = {name: self._column(per, f"{layer}.{name}") for name, per, _, _ in spec.columns(types)}
            self._layers.append(_layer(spec, of))

    def has(self, kind: str) -> bool:
        """Whether there is more of it than padding."""
        return self.num_ids[kind] > 1

    def _column(self, per: Per, name: str) -> Tensor:
        """By slot, or by location, wherever pages begin."""
        tensor = self.tables[per][name]
        return tensor if per is Per.SLOT else tensor.flatten(0, 1)

    def kv(self, layer: int) -> KvCache:
        entry = self._layers[layer]
        assert isinstance(entry, KvCache), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def state(self, layer: int) -> StateLayer:
        entry = self._layers[layer]
        assert isinstance(entry, StateLayer), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def reset_padding(self) -> None:
        """Make page 0 and slot 0 what they were at first, after a run whose writes had to go nowhere."""
        for table in self.tables.values():
            table.reset_padding()

    def regions(self) -> list[Region]:
        """Where every column lies: all that there is to copy when a page, window page or slot goes elsewhere."""
        return [region for per, table in self.tables.items() for region in table.regions(per)]


def _layer(spec: CacheSpec, of: Mapping[str, Tensor]) -> KvCache | StateLayer:
    match spec:
        case RecurrentState():
            return StateLayer(of.get("conv", torch.empty(0)), of.get("ssm", torch.empty(0)))
        case LatentAttention():
            return KvCache(of["k"], of["k"][..., : spec.rank], of.get("k_scale"), of.get("k_scale"))
        case _:
            return KvCache(of["k"], of["v"], of.get("k_scale"), of.get("v_scale"))
