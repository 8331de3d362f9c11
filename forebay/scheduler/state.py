"""Snapshots of the scheduler's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

import msgspec
import numpy as np

from forebay.memory.slots import CACHE, FREE, QUARANTINE, Slots
from forebay.requests.account import Account
from forebay.requests.request import Request
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.queues import Line, Queues


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One pool by holder, in its own unit (pages, rows): free + running + cached + quarantined = total (C8)."""

    name: str
    total: int
    free: int
    running: int
    cached: int = 0
    quarantined: int = 0


class TenantState(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one tenant, and the work for it since the start. `queued_s` is the time from arrival to start of
    the `num_started` requests, `computed_tokens` are of prompts."""

    name: str
    weight: int
    num_running: int = 0
    num_waiting: int = 0
    num_started: int = 0
    queued_s: float = 0.0
    computed_tokens: int = 0
    generated_tokens: int = 0


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Counters only grow; `map` has the owners of a sample of pages, in order of their number: 0 free,
    1 running, 2 cached, 3 other. Where other engines compute the other half of requests, `num_pending` wait for theirs
    and `num_transferring` for what is on its way."""

    step: int
    num_running: int
    num_waiting: int
    num_pending: int = 0
    num_transferring: int = 0
    num_waiting_tokens: int
    oldest_wait_s: float
    pools: list[PoolState]
    counters: dict[str, float]
    map: list[int] = []
    tenants: list[TenantState] = []  # where any are configured

    @classmethod
    def of(cls, queues: Queues, now: float) -> Self:
        """Return a snapshot of a scheduler."""
        arrivals = [req.arrival for req in (*queues.pending, *queues.waiting)]
        tiers = queues.memory.tiers
        given_up = {"tier_prefixes_given_up": float(tiers.retention.num_given_up)}
        return cls(
            step=queues.pools.steps.launched,
            num_running=queues.num_running,
            num_waiting=len(queues.waiting),
            num_pending=len(queues.pending),
            num_transferring=len(queues.transferring),
            num_waiting_tokens=queues.num_waiting_tokens,
            oldest_wait_s=now - min(arrivals) if arrivals else 0.0,
            pools=pool_states(queues.pools),
            counters={**queues.counters, **queues.pools.counters, **tiers.counters, **given_up},
            map=page_map(queues.pools.kv),
            tenants=tenant_states(
                (
                    queues.accounts[name] for name in {"": 1, **queues.config.tenants}
                ),  # and none of a check of the cache
                [*queues.running.reqs, *queues.extending],
                queues.waiting,
                queues.pending,
            )
            if queues.config.tenants
            else [],
        )


def pool_state(slots: Slots, cached: int = 0, unfenced: int = 0) -> PoolState:
    """`unfenced` slots of requests that have ended may still be touched by another engine."""
    quarantined = slots.num_quarantined + unfenced
    return PoolState(
        name=slots.name,
        total=slots.capacity,
        free=slots.num_free,
        running=slots.capacity - slots.num_free - cached - quarantined,
        cached=cached,
        quarantined=quarantined,
    )


def pool_states(pools: Pools) -> list[PoolState]:
    """Return the state of each pool; of adapters and of pictures only if the engine has such a pool."""
    found = [pool_state(slots, cached, pools.deferred.num_unfenced(slots)) for slots, cached in pools.all]
    if pools.adapters.slots.capacity:
        found.append(pool_state(pools.adapters.slots))
    if pools.pictures is not None:
        found.append(pool_state(pools.pictures.rows.slots, pools.pictures.num_cached))
    return found


def page_map(slots: Slots, cells: int = 256) -> list[int]:
    """Return the holders of a sample of the pool's slots, evenly spread."""
    ids = np.linspace(1, slots.capacity, min(cells, slots.capacity)).astype(np.int64)
    owner = slots.owner[ids]
    kinds = np.select([owner <= FREE, owner > 0, owner == CACHE, owner == QUARANTINE], [0, 1, 2, 3], default=3)
    cells_of: list[int] = kinds.tolist()
    return cells_of


def tenant_states(accounts: Iterable[Account], running: Iterable[Request], *lines: Line) -> list[TenantState]:
    """Return the state of each tenant; `lines` are those in which its requests wait."""
    num_running = Counter(req.account for req in running)
    return [
        TenantState(
            name=account.name,
            weight=account.weight,
            num_running=num_running[account],
            num_waiting=sum(len(line.of.get(account, ())) for line in lines),
            num_started=account.num_started,
            queued_s=account.queued_s,
            computed_tokens=account.computed_tokens,
            generated_tokens=account.generated_tokens,
        )
        for account in accounts
    ]
