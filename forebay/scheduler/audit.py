"""The audit of all pools: everything has exactly one holder (C8).

It takes time in proportion to the pools, and little memory, because it runs when the engine is idle and while it
recovers from MemoryError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from forebay.memory.holding import Allocation
from forebay.memory.kinds.kind import Kind, LockedKind
from forebay.memory.slots import CACHE, NO_OWNER, NO_SLOT, Holder
from forebay.requests.request import Request
from forebay.scheduler.memory.pools import Pools


def audit(pools: Pools, reqs: Sequence[Request]) -> None:
    """Raise LedgerError, or fail an assertion, unless every row, page and slot of any kind has exactly one holder."""
    allocations, deferred = [req.allocation for req in reqs], pools.deferred.entries
    rows = [allocation.row for allocation in allocations]
    pools.rows.audit(rows + [entry.row for entry in deferred if entry.row != NO_SLOT])
    pools.cache.check([allocation.pin for allocation in allocations] + [entry.pin for entry in deferred if entry.pin])
    pages = [
        Holder(allocation.id, pools.rows.pages(allocation.row, allocation.pin.num_pages, allocation.num_pages))
        for allocation in allocations
    ]
    pages += [Holder(entry.request_id, entry.pages) for entry in deferred]
    pages.append(pools.loading(pools.kv))
    pools.kv.audit(chain(_owned(pages), (Holder(CACHE, node.pages) for node in pools.cache.index.nodes())))
    for kind in pools.kinds:
        _audit_kind(kind, pools, allocations)


def _audit_kind(kind: Kind, pools: Pools, allocations: Sequence[Allocation]) -> None:
    released = [(entry.request_id, part) for entry in pools.deferred.entries for part in entry.holdings]
    released = [(owner, holding) for owner, holding in released if holding.kind.slots is kind.slots]
    if isinstance(kind, LockedKind):
        kind.check_locks(allocations, [holding for _, holding in released])
    slots = [*map(kind.holder, allocations), *(Holder(owner, holding.ids) for owner, holding in released)]
    slots.append(pools.loading(kind.slots))
    kind.slots.audit(chain(_owned(slots), _cached(kind, pools)))


def _owned(holders: Iterable[Holder]) -> Iterator[Holder]:
    return (holder for holder in holders if holder.owner != NO_OWNER)


def _cached(kind: Kind, pools: Pools) -> Iterator[Holder]:
    parts = [part for part in pools.kinds.attached if part in kind.parts]
    return (part.cached([node]) for node in pools.cache.index.nodes() for part in parts)
