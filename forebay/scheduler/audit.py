"""Whether everything has exactly one holder (C8). Takes time in proportion to the pools, and little memory: it runs in
idle moments, and while the engine recovers from MemoryError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from forebay.memory.kinds.kind import Kind
from forebay.memory.radix_node import Node
from forebay.memory.slots import CACHE, NO_OWNER, NO_SLOT, Holder
from forebay.requests.request import Request
from forebay.scheduler.memory.pools import Pools


def audit(pools: Pools, reqs: Sequence[Request]) -> None:
    """Raise LedgerError, or fail an assertion, unless every row, page and slot of any kind has exactly one holder."""
    allocations, deferred = [req.allocation for req in reqs], pools.deferred.entries
    pools.rows.audit([its.row for its in allocations] + [left.row for left in deferred if left.row != NO_SLOT])
    pools.cache.check([its.pin for its in allocations] + [left.pin for left in deferred if left.pin])
    pages = [Holder(its.id, pools.rows.pages(its.row, its.pin.num_pages, its.num_pages)) for its in allocations]
    pages += [Holder(left.request_id, left.pages) for left in deferred]
    pools.kv.audit(chain(_owned(pages), (Holder(CACHE, node.pages) for node in pools.cache.nodes())))
    for kind in pools.kinds:
        holdings = [(left.request_id, its) for left in deferred for its in left.holdings if its.kind is kind]
        kind.check_locks(allocations, [holding for _, holding in holdings])
        slots = [*map(kind.holder, allocations), *(Holder(owner, holding.ids) for owner, holding in holdings)]
        kind.slots.audit(chain(_owned(slots), _cached(kind, pools.cache.nodes())))


def _owned(holders: Iterable[Holder]) -> Iterator[Holder]:
    return (holder for holder in holders if holder.owner != NO_OWNER)


def _cached(kind: Kind, nodes: Iterable[Node]) -> Iterator[Holder]:
    return (kind.cached([node]) for node in nodes)
