"""Released memory that is not free yet: a step in flight, or another engine, may still access it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forebay.memory.holding import Allocation, DeferredFree, Holding, Steps, Transfer
from forebay.memory.kinds.kind import Kind, Kinds
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Pin
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import NO_IDS, NO_SLOT, Ids, Slots, as_ids


class TransferSlots(NamedTuple):
    """Slots by kind of cache that other engines may access until `ticket` is open, each once. All are booked for one
    request, whichever request they belonged to."""

    ticket: Transfer
    request_id: int
    ids: Mapping[str, Ids]


class Deferred:
    """The released memory that waits for its fence, and its return to the pools.

    Memory is fenced by the last step that was launched before its release. If another engine may read or write it, it
    waits for that transfer as well, however long that takes (C22).
    """

    def __init__(
        self, steps: Steps, kv: PagedKvAllocator, rows: ReqToTokenPool, cache: RadixCache, kinds: Kinds
    ) -> None:
        self._steps, self._kv, self._rows, self._cache, self._kinds = steps, kv, rows, cache, kinds
        self.entries: list[DeferredFree] = []
        self._in_transfer: list[DeferredFree] = []  # those that `reserve` made: they belong to no request

    @property
    def is_freeing(self) -> bool:
        """Whether memory becomes free once the steps in flight have committed."""
        return any(entry.ticket is None for entry in self.entries)

    @property
    def num_pages(self) -> int:
        """Pages that become available once the steps in flight have committed, without those that wait for another
        engine."""
        return sum(entry.num_pages for entry in self.entries if entry.ticket is None)

    @property
    def num_transfer_pages(self) -> int:
        """Pages that wait for another engine."""
        return sum(len(entry.pages) for entry in self.entries if entry.ticket)

    # -- releasing ------------------------------------------------------------------------------------------------

    def free(self, entry: DeferredFree) -> None:
        """Free memory now, or once its fence opens."""
        if entry.is_free:
            self._return(entry)
        else:
            self.entries.append(entry)

    def free_holding(self, holding: Holding | None, owner: int) -> None:
        """Free slots of one kind that `owner` released, once the steps launched by now have committed."""
        if holding is not None:
            self.free(DeferredFree(fence=self._steps.fence(), request_id=owner, holdings=(holding,)))

    def free_pages(self, allocation: Allocation, pages: Ids) -> None:
        """Free pages that a running request released, and what other kinds keep for them."""
        self._free_parts(allocation, pages, present(kind.release_pages(pages) for kind in self._kinds.paged))

    def free_all(self, allocation: Allocation, pages: Ids) -> None:
        """Free everything that a request held: its row, its own `pages`, its pin, and what other kinds keep for it."""
        self._free_parts(
            allocation,
            pages,
            present(kind.release_all(allocation) for kind in self._kinds.held),
            row=allocation.row,
            pin=allocation.pin,
        )

    def _free_parts(
        self,
        allocation: Allocation,
        pages: Ids,
        holdings: Sequence[Holding],
        *,
        row: int = NO_SLOT,
        pin: Pin | None = None,
    ) -> None:
        """A transfer that is not `whole` accesses pages only, so the row and other kinds do not wait for it."""
        ticket, fence = allocation.ticket, self._steps.fence()
        if ticket and not ticket.whole:
            self.free(DeferredFree(row=row, holdings=holdings, fence=fence, request_id=allocation.id))
            row, holdings = NO_SLOT, ()
        self.free(
            DeferredFree(
                ticket=ticket, row=row, pin=pin, pages=pages, holdings=holdings, fence=fence, request_id=allocation.id
            )
        )

    def drain(self) -> None:
        """Free all memory whose fence is open. Fences may open in another order than they were set."""
        at = 0
        while at < len(self.entries):
            if self.entries[at].is_free:
                self._return(self.entries.pop(at))
            else:
                at += 1

    def _return(self, entry: DeferredFree) -> None:
        """Return slots to their pools; no step in flight and no other engine can access them."""
        if len(entry.pages):
            self._kv.return_ids(entry.pages, entry.request_id)
        if entry.row != NO_SLOT:
            self._rows.free_row(entry.row)
        for holding in entry.holdings:
            holding.kind.return_slots(holding, entry.request_id)
        if self._in_transfer:
            self._in_transfer = [other for other in self._in_transfer if other is not entry]
        if entry.pin is not None:
            self._cache.unpin(entry.pin)

    # -- after the pools were cleared -----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all entries; the caller clears the pools."""
        self.entries.clear()
        self._in_transfer = []

    def reserve(self, slots: TransferSlots) -> None:
        """Take slots out of the cleared pools that other engines may still access, until their ticket opens."""
        of_rows = [kind.name for kind in self._kinds if kind.of_rows and kind.name in slots.ids]
        pages = slots.ids[self._kv.name]
        self._kv.claim(pages, slots.request_id)
        holdings = [Holding(kind, slots.ids[kind.name]) for kind in self._kinds.held if kind.name in slots.ids]
        for holding in holdings:
            holding.kind.slots.claim(holding.ids, slots.request_id)
        rows = np.unique(np.concatenate([NO_IDS, *(slots.ids[name] for name in of_rows)]))
        self._rows.claim(rows)
        fence, ticket, owner = self._steps.fence(), slots.ticket, slots.request_id
        entries = [DeferredFree(pages=pages, holdings=holdings, fence=fence, ticket=ticket, request_id=owner)]
        entries += [DeferredFree(row=row, fence=fence, ticket=ticket, request_id=owner) for row in rows.tolist()]
        self._in_transfer = [*entries]
        for entry in entries:
            self.free(entry)

    @property
    def num_reserved_rows(self) -> int:
        """Rows that `reserve` took and that are not free yet."""
        return sum(entry.row != NO_SLOT for entry in self._in_transfer)

    def num_reserved(self, kind: Kind) -> int:
        """Return the slots of a kind that `reserve` took and that are not free yet."""
        holdings = [
            holding for entry in self._in_transfer for holding in entry.holdings if holding.kind.slots is kind.slots
        ]
        return sum(len(holding.ids) for holding in holdings)

    # -- checking -------------------------------------------------------------------------------------------------

    def in_pool(self, slots: Slots) -> Iterator[tuple[DeferredFree, Ids]]:
        """Yield each entry with the slots of one pool that it has."""
        for entry in self.entries:
            if slots is self._kv:
                yield entry, entry.pages
            elif slots is self._rows.slots:
                yield entry, as_ids([entry.row] if entry.row != NO_SLOT else [])
            else:
                yield from ((entry, holding.ids) for holding in entry.holdings if holding.kind.slots is slots)

    def num_unfenced(self, slots: Slots) -> int:
        """Return the slots of a pool whose transfer ended here, and which another engine may still access."""
        return sum(len(ids) for entry, ids in self.in_pool(slots) if entry.ticket and entry.ticket.ended)


def present(holdings: Iterable[Holding | None]) -> list[Holding]:
    """Return the holdings of the kinds that have one."""
    return [holding for holding in holdings if holding is not None]
