"""Whether everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from forebay.memory.radix_node import Pin
from forebay.memory.slots import PAD, Holder, Ids
from forebay.requests.request import Request
from forebay.scheduler.residency import Residencies


def audit(held: Residencies, reqs: Sequence[Request]) -> None:
    """Raise LedgerError (or fail an assertion) unless every row, page, window page and state slot has exactly one
    holder (C8)."""
    rows: list[int] = []
    pins: list[Pin] = []
    pages: list[Holder] = []
    windows: list[Holder] = []
    slots: list[Holder] = []
    for req in reqs:
        its = req.residency
        rows.append(its.row)
        pins.append(its.pin)
        own = held.rows.pages(its.row, its.pin.num_pages, its.num_pages)
        pages.append(Holder(req.id, own))
        windows += [_windows_of(held, req.id, own)] if held.windows else []
        slots += [held.states.holder(its)] if held.states else []
    for leaving in held.leaving:
        rows += [leaving.row] if leaving.row != PAD else []
        pins += [leaving.pin] if leaving.pin else []
        pages.append(Holder(leaving.request_id, leaving.pages))
        windows.append(Holder(leaving.request_id, leaving.window_pages))
        slots.append(Holder(leaving.request_id, leaving.state_slots))
    held.rows.audit(rows)
    held.cache.check(pins)
    held.kv.audit([*_by_owner(pages), held.cache.holder()])
    if held.windows:
        _audit_locks(held, reqs)
        held.windows.pool.slots.audit([*_by_owner(windows), held.windows.pool.cached(held.cache.nodes())])
    if held.states:
        locked = {id(leaving.source) for leaving in held.leaving if leaving.source}
        assert held.states.cached.num_locked == len(locked), "a cached state is locked although no step copies it"
        held.states.pool.audit([*_by_owner(slots), held.states.cached.cached(held.cache.nodes())])


def reclaim_leaks(held: Residencies) -> int:
    """When nobody holds anything: quarantine whatever the ledgers still book for a request; how many."""
    num_lost = 0
    for slots, _ in held.pools:
        lost = np.flatnonzero(slots.owner > 0)
        for owner in np.unique(slots.owner[lost]).tolist():
            slots.quarantine(lost[slots.owner[lost] == owner], owner, "leaked")
        num_lost += len(lost)
    return num_lost


def _windows_of(held: Residencies, request_id: int, own: Ids) -> Holder:
    assert held.windows is not None
    ids = held.windows.pool.full_to_window[own]
    return Holder(request_id, ids[ids != PAD].astype(np.int64))


def _audit_locks(held: Residencies, reqs: Sequence[Request]) -> None:
    assert held.windows is not None
    pool = held.windows.pool
    locks = np.zeros_like(pool.locks)
    for req in reqs:
        its = req.residency
        locks[held.rows.pages(its.row, its.window_start, its.pin.num_pages)] += 1
    for leaving in held.leaving:
        locks[leaving.unlocked] += 1
    assert (locks == pool.locks).all(), "a cached window is locked by nobody, or read and not locked"
    assert pool.is_there(np.flatnonzero(locks)).all(), "a window that a request reads is not there"
    assert pool.num_locked == np.count_nonzero(locks), "the number of locked windows is miscounted"


def _by_owner(holders: Iterable[Holder]) -> list[Holder]:
    """One holder for each owner: a request may have let go of something and hold more."""
    own: dict[int, list[Ids]] = {}
    for holder in holders:
        own.setdefault(holder.owner, []).append(holder.ids)
    return [Holder(owner, np.concatenate(ids)) for owner, ids in own.items() if owner != PAD]
