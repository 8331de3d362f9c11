"""Whether everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from forebay.memory.slots import NO_SLOT, NOBODY, Holder, Ids
from forebay.requests.request import Request
from forebay.scheduler.residency import Residencies


def audit(held: Residencies, reqs: Sequence[Request]) -> None:
    """Raise LedgerError, or fail an assertion, unless every row, page and slot of any kind has exactly one holder."""
    residents, deferred = [req.residency for req in reqs], held.deferred
    held.rows.audit([its.row for its in residents] + [left.row for left in deferred if left.row != NO_SLOT])
    held.cache.check([its.pin for its in residents] + [left.pin for left in deferred if left.pin])
    pages = [Holder(its.id, held.rows.pages(its.row, its.pin.num_pages, its.num_pages)) for its in residents]
    pages += [Holder(left.request_id, left.pages) for left in deferred]
    held.kv.audit([*_by_owner(pages), held.cache.holder()])
    for kind in held.kinds:
        holdings = [(left.request_id, its) for left in deferred for its in left.holdings if its.kind is kind]
        kind.check_locks(residents, [holding for _, holding in holdings])
        slots = [*map(kind.holder, residents), *(Holder(owner, holding.ids) for owner, holding in holdings)]
        kind.slots.audit([*_by_owner(slots), kind.cached(held.cache.nodes())])


def _by_owner(holders: Iterable[Holder]) -> list[Holder]:
    """One holder for each owner: a request may have let go of something and hold more."""
    own: dict[int, list[Ids]] = {}
    for holder in holders:
        own.setdefault(holder.owner, []).append(holder.ids)
    return [Holder(owner, np.concatenate(ids)) for owner, ids in own.items() if owner != NOBODY]
