"""The bytes of all caches of layers: KV pages, window pages and recurrent states, from the layers' specs (C5, C6).

Index 0 of each is the padding: writes without effect go to page 0 or slot 0, and no live row reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.config.engine_config import CacheTypes
from forebay.memory.kinds.build import CACHES, has_pages
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import PAD
from forebay.ops.reference.attention import KvCache
from forebay.ops.reference.compression import TokenRing
from forebay.pools.cache_spec import CacheColumn, CacheSpec, Tier, cache_sizes
from forebay.pools.copy_stream import CopyStream
from forebay.pools.mover import Mover
from forebay.pools.regions import Take
from forebay.pools.table import Column, Table
from forebay.pools.tiers import HotRows, HotSizes, TakeTiers, Tiers, hot_columns


class StateLayer(NamedTuple):
    """Per slot, `[slots + 1, ...]`: the convolution's last inputs, and the scan's state. Empty for a part that the
    layer does not have."""

    conv: Tensor
    ssm: Tensor


_Layer = KvCache | StateLayer | TokenRing | Tensor


class PageMap(Table):
    """Row p is about page p of full KV; `pages` is the page of another kind of cache that holds the same tokens, PAD
    for no such page."""

    pages = Column(torch.int32, pad=PAD)


class CachePool:
    """Tables of the pages or slots of each kind of cache, with the columns of all layers. Each layer stores its own
    number.

    `num_slots` counts pages or slots by kind, without the padding one; a kind that is not named has padding alone.
    A kind with pages of its own has a page map, by name in `page_maps`. `mover` copies all columns. The memory comes
    from `take`; None: from torch. KV in the host tier has `tiers`, whose hot buffers have the sizes `hot` and whose
    memory comes from `take_tiers`.
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
        hot: HotSizes | None = None,
        take_tiers: TakeTiers | None = None,
    ) -> None:
        self.specs, self.page_size = tuple(specs), page_size
        declared = [spec.columns(types) for spec in self.specs]
        columns = _tables_of(declared, page_size)
        on_host = _names_on_host(declared)
        # With the padding page or slot.
        self.num_ids: dict[str, int] = {kind: num_slots.get(kind, 0) + 1 for kind in columns}
        self.tiers = self._make_tiers(on_host, hot, take_tiers or _zeros, device, take) if on_host else None
        made = {name: self.tiers.column(name, columns[KV][name]) for name in on_host} if self.tiers else {}
        self.tables: dict[str, Table] = {
            kind: Table(self.num_ids[kind], columns=own, made=made if kind == KV else {}, device=device, take=take)
            for kind, own in columns.items()
        }
        self.mover = self._make_mover(torch.device(device))
        # Of a sequence's tokens so many are read, the next among them; where no number is, all.
        kinds = cache_sizes(self.specs, types).kinds
        self.num_read: dict[str, int] = {name: size.num_read for name, size in kinds.items()}
        self.page_maps = self._make_page_maps(device, take)
        self._layers = [self._make_layer(layer, own) for layer, own in enumerate(declared)]

    def _make_mover(self, device: torch.device) -> Mover:
        """Make a mover, which copies between a GPU and the host on a stream of its own."""
        declared = {kind: {name: table[name] for name in table.columns} for kind, table in self.tables.items()}
        stream = CopyStream(device) if device.type == "cuda" else None
        return Mover(declared, self.page_size, {} if self.tiers is None else self.tiers.resident, stream)

    def _make_page_maps(self, device: torch.device | str, take: Take | None) -> dict[str, Tensor]:
        with_pages = [kind for kind in CACHES[1:] if has_pages(kind) and self.has(kind)]
        return {kind: PageMap(self.num_ids[KV], device=device, take=take).pages for kind in with_pages}

    def _make_layer(self, layer: int, declared: Sequence[CacheColumn]) -> _Layer:
        """Return the tensors of a layer, and let the tiers keep it if it has columns in the host tier."""
        spec = self.specs[layer]
        if self.tiers is not None and any(column.tier is Tier.HOST for column in declared):
            self.tiers.keep(layer, partial(_kv_layer, spec))
        return _layer(spec, {each.name: self._column(each, _name(layer, each)) for each in declared}, self.page_size)

    def _make_tiers(
        self,
        names: Sequence[str],
        hot: HotSizes | None,
        take_tiers: TakeTiers,
        device: torch.device | str,
        take: Take | None,
    ) -> Tiers:
        """Make the tiers of layers whose columns of these names are in the host tier."""
        assert hot is not None, "KV in the host tier is read through hot buffers: their sizes are missing"
        layers = sorted({int(name.partition(".")[0]) for name in names})
        sizes = {"S": hot.num_columns, "P": self.page_size}
        return Tiers(
            HotRows(hot.num_rows, columns=hot_columns(layers), sizes=sizes, device=device, take=take),
            num_columns=hot.num_columns,
            page_size=self.page_size,
            num_pages=self.num_ids[KV],
            num_resident=self.num_ids[RESIDENT],
            take=take_tiers,
        )

    def has(self, kind: str) -> bool:
        """Return True if there is more of this kind than padding."""
        return self.num_ids[kind] > 1

    def _column(self, column: CacheColumn, name: str) -> Tensor:
        """By slot, or by location, wherever pages begin."""
        tensor = self.tables[column.per][name]
        return tensor.flatten(0, 1) if column.tokens and has_pages(column.per) else tensor

    def kv(self, layer: int) -> KvCache:
        """Return the keys and values of a layer that keeps such, by location."""
        entry = self._layers[layer]
        assert isinstance(entry, KvCache), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def state(self, layer: int) -> StateLayer:
        """Return the state of a layer that keeps one per sequence, by slot."""
        entry = self._layers[layer]
        assert isinstance(entry, StateLayer), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def ring(self, layer: int) -> TokenRing:
        """Return the state rings of a layer that keeps such, by page or request row."""
        entry = self._layers[layer]
        assert isinstance(entry, TokenRing), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def positions(self, layer: int) -> Tensor:
        """Return the rings of rotary positions of a layer that keeps such, by request row."""
        entry = self._layers[layer]
        assert isinstance(entry, Tensor), f"layer {layer} keeps {self.specs[layer]!r}"
        return entry

    def reset(self) -> None:
        """Reset the caches to their initial values, all zeros; their memory must contain zeros already."""
        if self.tiers is not None:  # of all other columns the pads are zeros
            self.tiers.rows.reset()

    @property
    def num_bytes(self) -> dict[str, int]:
        """The bytes of each kind of cache."""
        found = {kind: sum(tensor.nbytes for tensor in table.tensors) for kind, table in self.tables.items()}
        return found if self.tiers is None else {**found, RESIDENT: self.tiers.resident_bytes}

    def reset_padding(self) -> None:
        """Reset page 0 and slot 0 after a run whose writes went there."""
        for table in self.tables.values():
            table.reset_padding()
        if self.tiers is not None:
            self.tiers.reset_padding()


def _name(layer: int, column: CacheColumn) -> str:
    return f"{layer}.{column.name}"


def _names_on_host(declared: Sequence[Sequence[CacheColumn]]) -> list[str]:
    return [_name(layer, each) for layer, own in enumerate(declared) for each in own if each.tier is Tier.HOST]


def _tables_of(declared: Sequence[Sequence[CacheColumn]], page_size: int) -> dict[str, dict[str, Column]]:
    """Return the columns of the tables of all kinds of cache; `declared` are those of each layer."""
    columns: dict[str, dict[str, Column]] = {kind: {} for kind in CACHES}
    for layer, own in enumerate(declared):
        for column in own:
            shape = (*column.entries(page_size), *column.shape) if has_pages(column.per) else column.shape
            columns[column.per][_name(layer, column)] = Column(getattr(torch, column.dtype), shape, pad=0)
    return columns


def _layer(spec: CacheSpec, own: Mapping[str, Tensor], page_size: int) -> _Layer:
    if "positions" in own:
        return own["positions"]
    if "gate" in own:
        # States by token are rings as long as a page.
        return TokenRing(
            *(part if part.dim() == 3 else part.view(-1, page_size, part.shape[1]) for part in own.values())
        )
    if "k" not in own:
        return StateLayer(own.get("conv", torch.empty(0)), own.get("ssm", torch.empty(0)))
    return _kv_layer(spec, own)


def _kv_layer(spec: CacheSpec, own: Mapping[str, Tensor]) -> KvCache:
    if within := spec.values_within_keys:
        return KvCache(own["k"], own["k"][..., :within], own.get("k_scale"), own.get("k_scale"))
    return KvCache(own["k"], own["v"], own.get("k_scale"), own.get("v_scale"))


def _zeros(on_device: int, on_host: int) -> Tensor:
    return torch.zeros(on_device + on_host, dtype=torch.uint8)
