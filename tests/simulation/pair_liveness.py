"""Which requests of a pair of engines must progress, and when they must end, computed apart from the roles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import NO_OWNER
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan
from forebay.requests.transfers import Arrived, Closed, Event, Offer, Order, Renewed, Ticket
from forebay.requests.updates import Update
from forebay.scheduler.arrivals import HANDOVERS_PER_PLAN
from tests.simulation.hash_step import HashStep
from tests.simulation.liveness import Liveness, _Times, require
from tests.simulation.retracting import RetractingScheduler

if TYPE_CHECKING:
    from tests.simulation.faulty_device import CopyStep

TICKS: Final = 400  # in which any room ends that has the engines to itself
TICKS_PER_TOKEN: Final = 20  # of the rooms that live at the same time


class PairLiveness(Liveness):
    """`Liveness` of an engine with a role. `DecodeRole` offers places in order of rank, and starts what has arrived."""

    def __init__(self, config: SchedulerConfig, scheduler: RetractingScheduler) -> None:
        super().__init__(config, scheduler)
        self._options = config.disaggregation
        self._leases: dict[int, float] = {}  # by request: when its lease began
        self._of: dict[Ticket, int] = {}  # on decode
        self._arrived: set[Ticket] = set()

    # -- what happens ----------------------------------------------------------------------------------------------

    def offered(self, order: Order, request_id: int, now: float) -> None:
        """Decode gives an order."""
        if isinstance(order, Offer):
            self._of[order.ticket], self._leases[request_id] = request_id, now

    def takes(self, event: Event, now: float) -> None:
        request_id = self._of.get(event.ticket)
        match event:
            case Renewed() if request_id in self._leases and event.ticket not in self._arrived:
                self._leases[request_id] = now
            case Arrived():
                self._arrived.add(event.ticket)
                if request_id is not None:
                    self._leases.pop(request_id, None)
            case Closed():
                self._of.pop(event.ticket, None)
                self._arrived.discard(event.ticket)

    def heard(self, updates: Iterable[Update], now: float) -> None:
        updates = list(updates)
        for update in updates:
            if update.token_ids and update.request_id in self._times:
                self._times[update.request_id].started = True
            if update.finish:
                self._leases.pop(update.request_id, None)
        super().heard((update for update in updates if update.finish or update.request_id in self._times), now)

    def computed(self, plan: StepPlan, step: HashStep | CopyStep, now: float) -> None:
        super().computed(plan, step, now)
        extended = set(step.tenants[: plan.num_extends].tolist())
        for req in self._scheduler.queues.transferring:
            if req.id in extended and not self._options.is_decode:
                self._times[req.id].progress = self._leases[req.id] = now

    def cleared(self) -> None:
        """Decode waits for no transfer any more."""
        if self._options.is_decode:
            self._leases.clear()

    def went_on(self, now: float) -> None:
        """The time for which a request waited for an engine that slept is no delay."""
        for req in self._scheduler.queues.waiting:
            self._times[req.id].progress = now

    def weights_changed(self) -> None:
        """Every request begins again."""
        for req in (*self._scheduler.queues.pending, *self._scheduler.queues.waiting):
            self._times[req.id].started = False

    def planned(self, plan: StepPlan | None, now: float) -> None:
        forced = self._num_retracted > 0
        others = any(not admission.prebuilt for admission in plan.admissions) if plan else False
        super().planned(plan, now)
        if self._options.is_decode and not (forced or others or self._scheduler.queues.suspects.groups):
            self._check_arrived()
            self._check_pending()

    # -- the rules -------------------------------------------------------------------------------------------------

    def _is_late(self, request_id: int, times: _Times, now: float) -> bool:
        config, req = self._config, self._scheduler.requests[request_id]
        if now - times.arrival > config.request_timeout_s or self._has_lost_its_peer(req, now):
            return True
        if req.status in (Status.PENDING, Status.WAITING) and not times.started:
            return now - times.arrival > config.queue_timeout_s
        moves = req.status is not Status.TRANSFERRING and (
            self._scheduler.queues.admits or req.maybe_allocation is not None
        )
        return moves and now - times.progress > config.stall_timeout_s

    def _has_lost_its_peer(self, req: Request, now: float) -> bool:
        if req.rendezvous is None:
            return False
        if not self._options.is_decode and req.status is Status.PENDING:
            return now - self._times[req.id].arrival > self._options.bootstrap_timeout_s
        return now - self._leases.get(req.id, now) > self._options.lease_s

    def _check_head(self, waiting: list[Request], plan: StepPlan | None, started: list[Request]) -> None:
        if self._scheduler.queues.num_running < self._config.max_running_requests:
            super()._check_head(waiting, plan, started)

    def _check_arrived(self) -> None:
        """A request that has its first token runs as soon as fewer requests run than may."""
        scheduler, most = self._scheduler, self._config.max_running_requests
        arrived = [req for req in scheduler.queues.transferring if req.num_output]
        require(
            not arrived or scheduler.queues.num_running >= most,
            f"{arrived} arrived, and {scheduler.queues.num_running} run of {most}",
        )

    def _check_pending(self) -> None:
        """The first in rank is offered places if there are places for all that every request could ever need."""
        scheduler, pools = self._scheduler, self._scheduler.pools
        if not scheduler.queues.pending or scheduler.queues.waiting or scheduler.queues.is_saving or pools.scarce:
            return
        if sum(isinstance(order, Offer) for order in scheduler.handoff.tickets.orders) >= HANDOVERS_PER_PLAN:
            return
        if not pools.rows.available_size():
            return
        head = min(scheduler.queues.pending, key=self._rank)
        rows = np.flatnonzero(pools.table.request_id != NO_OWNER)
        whole = self._pages(head.max_kv_len) + sum(self._pages(int(pools.table.max_kv_len[row])) for row in rows)
        left = sum(len(freed.pages) for freed in pools.deferred.entries)
        left += sum(req.allocation.num_pages for req in scheduler.queues.finishing)
        require(
            whole + left > pools.usable_pages - pools.cache.num_pages + pools.cache.num_evictable,
            f"{head} is offered nothing, although it and {len(rows)} others need {whole} pages at most, {left} are "
            f"not free yet, and there are {pools.usable_pages}",
        )


@dataclass(slots=True)
class _Room:
    ticks: int = 0
    limit: int = TICKS


class Rooms:
    """A bound of the virtual time for which a room lives: by the tokens of all rooms that live at the same time, and
    `ticks_of_timeouts` more."""

    def __init__(self, ticks_of_timeouts: int) -> None:
        self._rooms: dict[int, _Room] = {}
        self._extra = ticks_of_timeouts
        self._tokens: dict[int, int] = {}

    def begin(self, room: int, num_tokens: int) -> None:
        """A room begins, or one more request is in it."""
        for other in self._rooms.values():
            other.limit += TICKS_PER_TOKEN * num_tokens
        self._tokens[room] = self._tokens.get(room, 0) + num_tokens
        self._rooms[room] = _Room(0, TICKS + self._extra + TICKS_PER_TOKEN * sum(self._tokens.values()))

    def tick(self, living: set[int], *, counts: bool) -> None:
        """A tick has passed, and the requests of these rooms live; it `counts` unless an engine sleeps."""
        for ended in self._rooms.keys() - living:
            del self._rooms[ended], self._tokens[ended]
        for number, room in self._rooms.items():
            room.ticks += counts
            require(room.ticks <= room.limit, f"room {number} lives after {room.ticks} ticks, at most {room.limit}")
