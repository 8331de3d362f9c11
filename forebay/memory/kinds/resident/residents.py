"""Resident copies: pages on the device for prompts whose KV is in the host tier (HiSparse, C23).

The KV itself is in the host tier, under the page numbers of full KV. A copy only makes reading faster, so a request
never waits for one: a page without a copy is read from the host tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from forebay.base.counters import Counter
from forebay.base.units import ceil_div
from forebay.config.engine_config import Ledger
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
from forebay.memory.kinds.kind import (
    Arrival,
    CheckedKind,
    CountingKind,
    DecodedKind,
    DeviceCountingKind,
    ExtendedKind,
    HeldKind,
    Kind,
    PagedKind,
    PlannedKind,
    ReplacedKind,
    RestartedKind,
)
from forebay.memory.radix_node import Node
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import NO_IDS, NO_SLOT, Holder, Ids, Slots

RESIDENT: Final = "resident"
# Tokens of a hit that a query behind it reads: the field's top k. A hit that is longer than all that they read is not
# worth loading.
_READ_PER_TOKEN: Final = 2048


class Residents(
    Kind,
    HeldKind,
    ExtendedKind,
    DecodedKind,
    PagedKind,
    ReplacedKind,
    CheckedKind,
    RestartedKind,
    PlannedKind,
    CountingKind,
    DeviceCountingKind,
):
    """`num_resident_pages` copies for the `num_pages` pages of KV, and which page has one.

    A request whose prompt is computed takes copies for its pages, those of its prefix hit included, and frees them when
    it begins to decode. It alone holds a copy that it took: another request with the same page reads the copy as long
    as it exists. The plan has each change of the map, removals too.
    """

    name: ClassVar[str] = RESIDENT
    COUNTERS = (
        Counter("hisparse_read_tokens", "Tokens that decodes selected in layers with two tiers"),
        Counter("hisparse_loaded_tokens", "Those of them that were not in a hot buffer"),
    )

    def __init__(
        self, num_resident_pages: int, num_pages: int, rows: ReqToTokenPool, *, ledger: Ledger = Ledger.RAISE
    ) -> None:
        self.slots = Slots(RESIDENT, num_resident_pages, ledger=ledger)
        self.full_to_hisparse_device_index_mapping: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self._rows = rows
        self._decodes = np.zeros(rows.slots.num_rows, dtype=np.bool_)  # rows that have hot buffers
        self._pages: dict[int, list[Ids]] = {}  # pages whose copies a request holds, by its id
        self._changed: list[Ids] = []  # pages whose entries the next plan sends
        self._loaded: list[Ids] = []  # pages whose copies the next plan fills
        self._hot_rows: list[Ids] = []  # rows that begin to decode in the next plan
        self._totals = [0, 0]

    def admit(self, allocation: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Allocate copies of the pages of a prefix hit, if enough tokens behind it read them. Pages from the host or
        from another engine arrive after the loads of the step, and are read from the host tier."""
        self._decodes[allocation.row] = False
        pages = self._rows.pages(allocation.row, 0, allocation.num_pages)
        self._changed.append(pages)
        there = pages[: allocation.pin.num_pages]
        num_new = allocation.extend_target - len(there) * self._rows.page_size
        if not arrival.from_elsewhere and num_new * _READ_PER_TOKEN >= len(there) * self._rows.page_size:
            self._loaded.append(self._take(there, allocation.id))

    def extend(self, allocation: Allocation, stop: int, draft: Draft) -> None:
        page_size = self._rows.page_size
        first, last = ceil_div(allocation.kv_len, page_size), ceil_div(stop, page_size)
        if first < last:
            pages = self._rows.pages(allocation.row, first, last)
            self._changed.append(pages)
            self._take(pages, allocation.id)

    def decode(self, table: RowTable, rows: Ids, committed: int, draft: Draft) -> None:
        begin = rows[~self._decodes[rows]]
        if not len(begin):
            return
        self._decodes[begin] = True
        self._hot_rows.append(begin)
        for row in begin.tolist():
            allocation = table.allocation_of(row)
            # Steps run in order: whoever takes these copies next writes them behind the steps in flight.
            self.slots.return_ids(self._detach(allocation.id), allocation.id)

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        """Return the changes since the last plan."""
        changed, loaded, hot = self._drain(self._changed), self._drain(self._loaded), self._drain(self._hot_rows)
        if len(changed):
            changed = np.unique(changed)
        mapping = self.full_to_hisparse_device_index_mapping
        loaded = loaded[mapping[loaded] != NO_SLOT] if len(loaded) else loaded  # whose request has not left meanwhile
        columns = {"resident_pages": changed, "resident_slots": mapping[changed].astype(np.int64)}
        columns |= {"load_pages": loaded, "load_slots": mapping[loaded].astype(np.int64), "hot_rows": hot}
        return {name: ids for name, ids in columns.items() if len(ids)}

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> Ids:
        """Move the copies of pages that a request gives up to the pages that it has instead, where these lack one."""
        mapping = self.full_to_hisparse_device_index_mapping
        moves = (mapping[own] != NO_SLOT) & (mapping[cached] == NO_SLOT)
        mapping[cached[moves]], mapping[own[moves]] = mapping[own[moves]], NO_SLOT
        if moves.any():
            self._forget(own[moves])
            self._pages.setdefault(owner, []).append(cached[moves])
        self._changed += [cached, own]
        return NO_IDS

    def release_pages(self, pages: Ids) -> Holding | None:
        mapping = self.full_to_hisparse_device_index_mapping
        there = pages[mapping[pages] != NO_SLOT]
        if not len(there):
            return None
        self._forget(there)
        return Holding(self, self._unmap(there))

    def release_all(self, allocation: Allocation) -> Holding:
        self._decodes[allocation.row] = False
        return Holding(self, self._detach(allocation.id))

    def return_slots(self, holding: Holding, owner: int) -> None:
        self.slots.return_ids(holding.ids, owner)

    def start_over(self, draft: Draft) -> None:
        """Send no change for requests that are gone: each admission sends the entries of its pages."""
        self._forget_changes()

    def clear(self) -> None:
        self.slots.clear()
        self.full_to_hisparse_device_index_mapping[:] = NO_SLOT
        self._decodes[:] = False
        self._pages.clear()
        self._forget_changes()

    def count(self, totals: Ids) -> bool:
        (_, before), self._totals = self._totals, totals.tolist()
        return self._totals[1] > before

    @property
    def counters(self) -> dict[str, float]:
        return dict(zip((counter.name for counter in self.COUNTERS), self._totals, strict=True))

    def holder(self, allocation: Allocation) -> Holder:
        pages = np.concatenate([NO_IDS, *self._pages.get(allocation.id, ())])
        return Holder(allocation.id, self.full_to_hisparse_device_index_mapping[pages].astype(np.int64))

    def check(self, nodes: Iterable[Node]) -> None:
        mapping = self.full_to_hisparse_device_index_mapping
        owned = np.concatenate([NO_IDS, *(pages for own in self._pages.values() for pages in own)])
        assert len(owned) == np.count_nonzero(mapping), "a resident copy is held by no request, or by two"

    def _take(self, pages: Ids, owner: int) -> Ids:
        """Take copies for those of `pages` that have none, as far as copies are free; return these pages."""
        mapping = self.full_to_hisparse_device_index_mapping
        pages = pages[mapping[pages] == NO_SLOT][: self.slots.num_free]
        if len(pages):
            mapping[pages] = self.slots.take_ids(len(pages), owner)
            self._pages.setdefault(owner, []).append(pages)
        return pages

    def _detach(self, owner: int) -> Ids:
        """Return the copies that a request holds, which no page has any more."""
        return self._unmap(np.concatenate([NO_IDS, *self._pages.pop(owner, ())]))

    def _unmap(self, pages: Ids) -> Ids:
        ids: Ids = self.full_to_hisparse_device_index_mapping[pages].astype(np.int64)
        self.full_to_hisparse_device_index_mapping[pages] = NO_SLOT
        self._changed.append(pages)
        return ids

    def _forget(self, pages: Ids) -> None:
        """No request holds the copies of these pages."""
        for owner, owned in self._pages.items():
            self._pages[owner] = [own[~np.isin(own, pages)] for own in owned]

    def _forget_changes(self) -> None:
        for changes in (self._changed, self._loaded, self._hot_rows):
            changes.clear()

    @staticmethod
    def _drain(changes: list[Ids]) -> Ids:
        drained = np.concatenate([NO_IDS, *changes])
        changes.clear()
        return drained
