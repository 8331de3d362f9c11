"""The queues of unfinished requests, from arrival to end."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from forebay.base.room import Room
from forebay.config.engine_config import SchedulerConfig
from forebay.requests.account import Account
from forebay.requests.request import Request, Status
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import CacheReport
from forebay.scheduler.counters import OF_SCHEDULER, zeros
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.journal import Journal, Record
from forebay.scheduler.memory.engine_memory import EngineMemory
from forebay.scheduler.suspects import Suspects

by_rank: Final = attrgetter("rank")


class Line:
    """A waiting line. `of` has each tenant's requests in the order of their rank, and no tenant without any. Nothing in
    here depends on how many requests wait, but what looks at all of them."""

    def __init__(self) -> None:
        self.of: dict[Account, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.of.values())

    def __contains__(self, req: Request) -> bool:
        return req in self.of.get(req.account, ())

    def add(self, req: Request) -> None:
        """Insert a request into its account's part of the queue, by rank."""
        insort(self.of.setdefault(req.account, []), req, key=by_rank)

    def remove(self, req: Request) -> None:
        """Remove a request; it must be in the queue."""
        own = self.of[req.account]
        own.remove(req)
        if not own:
            del self.of[req.account]

    @property
    def first(self) -> Request:
        """The first in rank of the tenant that has been served least."""
        return self.of[min(self.of, key=lambda account: account.service)][0]


class Flight(NamedTuple):
    """A launched step whose result is awaited: its requests, in the plan's order. `chunks` are those of its first
    requests. `encoded_for` has the requests for whose pictures it encodes, each with the number of tokens that have KV
    once the request has got past the step. `ahead`: it was launched while another step was in flight."""

    plan: StepPlan
    reqs: list[Request]
    chunks: Sequence[Chunk] = ()
    encoded_for: Mapping[Request, int] = {}
    ahead: bool = False

    @property
    def suspected(self) -> list[tuple[Request, int]]:
        """Return the requests that the step is for, each with the KV length at which it has got past the step."""
        lengths = {chunk.req: chunk.stop for chunk in self.chunks}
        lengths |= {req: len(req.tokens) for req in self.reqs[len(self.chunks) :]}
        for req, length in self.encoded_for.items():
            lengths[req] = max(length, lengths.get(req, 0))
        return [*lengths.items()]


class Blocked(NamedTuple):
    """A request whose turn it was, and which did not start: a row (or a state) was missing, or else pages. `returning`:
    some of that was on its way back, behind a step in flight."""

    req: Request
    lacks_row: bool
    returning: bool


class Queues:
    """The unfinished requests (`requests`, by id), and the engine's `memory`, with its `pools`.

    Decoding requests are in `running`, requests whose known tokens still lack KV in `extending`; the others wait, by
    tenant and rank. In a disaggregated engine, requests that cannot be queued yet are `pending`, in the same order, and
    those whose cache is being transferred are `transferring`. `finishing` has ended requests of which a step in flight
    writes a state worth keeping. `flights` are the launched steps. Requests with a grammar are also in `constraints`.
    """

    def __init__(self, config: SchedulerConfig, constraints: Constraints) -> None:
        self.config, self.constraints = config, constraints
        self.memory = EngineMemory(config)
        self.pools = self.memory.pools
        self.requests: dict[int, Request] = {}
        self.room = Room(config.tenants)
        self.accounts = {name: Account(name, weight) for name, weight in {"": 1, **config.tenants}.items()}
        self.pending = Line()
        self.transferring: list[Request] = []
        self.waiting = Line()
        self.blocked: Blocked | None = None  # in the last plan
        self.encoding: dict[Account, Request] = {}  # that wait while their pictures are encoded, and have rows for them
        self.claimant: Account | None = None  # takes places from another tenant; no request of others starts before it
        self.extending: list[Request] = []
        self.running = ScheduleBatch(self.pools.table)
        self.finishing: list[Request] = []
        self.flights: deque[Flight] = deque()
        self.num_waiting_tokens = 0
        self.admits = True  # whether requests start; see `scheduler.halt`
        self.now = 0.0  # when the scheduler was last called with a time
        self.step_cost = 0.0  # tokens of prompts that take as long as a step without tokens, as measured outside
        self.weight_version = 0  # of the weights that compute whatever is computed now
        self.suspects = Suspects()
        self.counters = zeros(OF_SCHEDULER)
        self.journal: Journal | None = None  # None: inputs are not recorded
        self.pools.adapters.note = self.record

    def record(self, record: Record) -> None:
        """Record an input, if inputs are recorded."""
        if self.journal is not None:
            self.journal(record)

    @property
    def is_saving(self) -> bool:
        """Whether a step has yet to copy released memory to the host, whose slots may be allocated again."""
        return self.pools.draft.reads_released or any(
            flight.plan.host.saves or flight.plan.host.stores for flight in self.flights
        )

    @property
    def idle(self) -> bool:
        return not (self.requests or self.flights)

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.extending)

    @property
    def candidates(self) -> Mapping[Account, Sequence[Request]]:
        """Return the requests that may start now, by tenant and rank: none whose grammar is not compiled, and while
        suspects are under test, only those."""
        unready, suspects = self.constraints.unready, self.suspects.under_test
        return {
            account: [req for req in reqs if req.id not in unready and (not suspects or req in suspects)]
            for account, reqs in self.waiting.of.items()
        }

    @property
    def victim(self) -> Request:
        """The request to retract when memory runs out: the last in rank of the tenant that holds the most pages for its
        weight. The first in rank of each tenant is spared while others run, and the first of all even then."""
        reqs = sorted([*self.running.reqs, *self.extending], key=by_rank)
        first: dict[Account, Request] = {}
        pages: dict[Account, float] = {}
        for req in reqs:
            first.setdefault(req.account, req)
            pages[req.account] = pages.get(req.account, 0) + req.allocation.num_pages / req.account.weight
        others = [req for req in reqs if req is not first[req.account]]
        if not others:
            return reqs[-1]
        most = max(pages[req.account] for req in others)
        return next(req for req in reversed(others) if pages[req.account] == most)

    # -- moving -------------------------------------------------------------------------------------------------------

    def wait_for_peer(self, req: Request) -> None:
        """Move a new request to PENDING. It holds no memory."""
        req.move(Status.PENDING)
        self.pending.add(req)

    def transfer(self, req: Request) -> None:
        """Mark a request as transferring: its cache goes to another engine, or comes from there."""
        self.remove(req)
        req.move(Status.TRANSFERRING)
        self.transferring.append(req)

    def enqueue(self, req: Request) -> None:
        """Add a request to the waiting queue, in the order of its rank, and count its tokens."""
        self.join(req.account, self.waiting)
        self.waiting.add(req)
        self.num_waiting_tokens += len(req.tokens)

    def join(self, account: Account, line: Line) -> None:
        """A tenant that had nothing in `line` has a request to add. It has no credit for the time before (C32): it
        begins level with the tenant in line that has been served least. If no tenant is in line none has been made to
        wait, so all begin level."""
        if account not in line.of:
            level = min(line.of, key=lambda other: other.service) if line.of else None
            service = level.service if level else max(other.service for other in self.accounts.values())
            account.service = max(account.service, service)
            account.waits_since, account.waits_since_s = self.pools.steps.launched, self.now

    def start(self, req: Request, report: CacheReport, now: float) -> None:
        """A waiting request has been admitted; `report` says what of it was cached."""
        self.waiting.remove(req)
        self.num_waiting_tokens -= len(req.tokens)
        req.account.waits_since, req.account.waits_since_s = self.pools.steps.launched, now
        req.move(Status.EXTENDING)
        req.last_progress = now
        req.prompt_logprobs = []  # a retraction before the first token: every position is computed again
        insort(self.extending, req, key=by_rank)
        if req.cache_report is None:
            req.cache_report, req.waited_s = report, now - req.arrival
            req.account.num_started += 1
            req.account.queued_s += req.waited_s
            self.counters["cached_tokens"] += report.cached_tokens
            self.counters[f"misses.{report.miss_reason}"] += 1
        else:
            num_recomputed = len(req.tokens) - report.cached_tokens
            req.num_recomputed += num_recomputed
            self.counters["recomputed_tokens"] += num_recomputed

    def launch_extends(self, chunks: Sequence[Chunk]) -> None:
        """The chunks are on their way: requests whose last chunk this is decode from the next step on."""
        extends = ScheduleBatch(self.pools.table)
        extends.prepare_for_extend(chunks)
        extends.filter_batch(np.flatnonzero([stop == req.allocation.extend_target for req, _, stop in chunks]))
        for req in extends.reqs:
            req.move(Status.DECODING)
            self.extending.remove(req)
        self.running.merge_batch(extends)

    def remove(self, req: Request, status: Status | None = None) -> None:
        """Remove a request from the queue or batch of its status, or of `status`."""
        match status or req.status:
            case Status.DECODING:
                self.running.remove(req)
            case Status.EXTENDING:
                self.extending.remove(req)
            case Status.WAITING:
                self.waiting.remove(req)
                self.num_waiting_tokens -= len(req.tokens)
            case Status.PENDING:
                self.pending.remove(req)
            case _:
                self.transferring.remove(req)

    def requeue(self, req: Request) -> None:
        """Let a request that has left its batch wait; what completed steps computed for it stays in the cache."""
        self.memory.allocator.release(req, req.allocation.kv_committed)
        req.move(Status.WAITING)
        req.resume_after = self.pools.steps.launched
        self.enqueue(req)

    def requeue_all(self, *, cleared: bool) -> None:
        """Return all requests to the waiting queue, without memory; call it with no step in flight.

        Unless `cleared`, requests that are being received from another engine keep their memory."""
        self.flights.clear()
        self.running = ScheduleBatch(self.pools.table)
        self.extending, self.finishing = [], []
        for req in self.requests.values():
            if req.status in (Status.EXTENDING, Status.DECODING) or (req.maybe_allocation and cleared):
                req.move(Status.WAITING)
            if req.status is Status.WAITING:
                req.maybe_allocation = None
                req.resume_after = 0
        self.transferring = [req for req in self.transferring if req.status is Status.TRANSFERRING]
        before, self.waiting = self.waiting, Line()
        for req in self.requests.values():
            if req.status is Status.WAITING:
                self.join(req.account, before)
                self.waiting.add(req)
        self.num_waiting_tokens = sum(len(req.tokens) for req in self.waiting)
