"""The replay of a recording: a scheduler gets its inputs, and the plans are compared with the recorded ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, from_code
from forebay.config.engine_config import SchedulerConfig
from forebay.engine.recorder import mark
from forebay.memory.adapters import AdapterChanged
from forebay.requests.account import Account
from forebay.requests.request import Request, RequestFault
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.transfers import Arrived
from forebay.requests.updates import Failure
from forebay.scheduler.checked_prefixes import CHECK, clear_checks
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.halt import Halt, Mode, forget_caches, keep_cached, resume, weights_changed
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.journal import (
    Aborted,
    AdapterLost,
    Added,
    Beyond,
    CheckEnded,
    ChecksCleared,
    Committed,
    Compiled,
    Drafted,
    Expired,
    Flushed,
    FlushedOn,
    Forgotten,
    Halted,
    HaltPlanning,
    Marked,
    Measured,
    Origin,
    Planned,
    Planning,
    Reclaimed,
    Record,
    Recovering,
    Resumed,
    Reweighed,
    SetAside,
    StepFailed,
    Transferred,
    Unmarked,
    Unwritable,
)
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.recovery import end_requests_of
from forebay.scheduler.scheduler import Scheduler

MakeScheduler = Callable[[SchedulerConfig, Proposer | None, Handoff], Scheduler]
Execute = Callable[[StepPlan], None]

_LOST: Final = Failure.of(from_code("EngineError", "as recorded", "adapter_lost"))
_INSIDE: Final = (Planned, Drafted, Compiled)  # records that a scheduler writes while it handles another one


class NotExecuted(Exception):
    """A plan could not be executed, for the reason in `__cause__`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first plan, by the number of its record, that differs. None means that no step was decided."""

    number: int
    recorded: Planned | None
    replayed: Planned | None


@dataclass(kw_only=True)
class Outcome:
    """The result of a replay: plans that were equal, the difference if there is one, and the reason why the replay
    ended before the last record."""

    num_plans: int = 0
    difference: Difference | None = None
    ended: str = ""


@dataclass(kw_only=True, eq=False)
class _Cursor:
    """The records, and the next one."""

    records: Sequence[Record]
    at: int = 0

    def peek(self) -> Record | None:
        return self.records[self.at] if self.at < len(self.records) else None

    def take(self, kind: type[Record]) -> Record | None:
        """Return the next record if it is of this kind, and go on."""
        record = self.peek()
        if not isinstance(record, kind):
            return None
        self.at += 1
        return record


class RecordedDrafts(Proposer):
    """Drafts as many tokens as recorded. Their values decide nothing: the recorded result says which are accepted."""

    def __init__(self, cursor: _Cursor) -> None:
        self._cursor = cursor
        self._counts: deque[int] | None = None

    def begin_step(self, num_requests: int) -> None:
        record = self._cursor.take(Drafted)
        self._counts = deque(record.counts) if isinstance(record, Drafted) else None

    def propose(self, req: Request, most: int) -> Sequence[int]:
        if self._counts is not None:
            return [0] * (self._counts.popleft() if self._counts else 0)
        following = self._cursor.peek()
        if isinstance(following, Recovering) and following.culprit in (req.id, -1):
            raise RuntimeError("drafting failed when it was recorded")
        return ()

    def ended(self, req: Request) -> None:
        """Forget nothing."""


class RecordedGrammars:
    """Grammars that are compiled when they were."""

    def __init__(self, cursor: _Cursor) -> None:
        self._cursor = cursor

    def begin(self, req: Request) -> None:
        """Begin nothing."""

    def ready(self, req: Request) -> bool:
        """Return whether the next record has this grammar as compiled. Raises InvalidRequest if it was refused."""
        record = self._cursor.peek()
        if not isinstance(record, Compiled) or record.id != req.id:
            return False
        self._cursor.at += 1
        if record.refused:
            raise InvalidRequest("the grammar was refused when it was recorded")
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def drafts(self, req: Request, drafts: Sequence[int], most: int) -> list[int]:
        """Return all drafts: the record has those that were allowed."""
        return list(drafts)

    def fill(self, step: int, wanted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Compute nothing: results are recorded."""

    def error(self, req: Request) -> EngineError | None:
        """Return None: an error changes only what clients read."""
        return None

    def ended(self, req: Request) -> None:
        """Free nothing."""


def _role(origin: Origin) -> Handoff:
    """Return the role of the recorded engine, as new."""
    options = origin.config.disaggregation
    role: Handoff = Handoff()
    if options.is_decode:
        role = DecodeRole(options, origin.instance)
    elif options.is_prefill:
        role = PrefillRole(options)
    role.wakes = origin.wakes
    return role


def _scheduler(config: SchedulerConfig, proposer: Proposer | None, role: Handoff) -> Scheduler:
    return Scheduler(config, proposer, role)


@dataclass(kw_only=True)
class Replay:
    """One replay: of all records, or if `begins_at_mark` of those behind the first state of an idle scheduler.

    `stop_at` is the step whose plan ends it, -1 for none. `observe` gets the number of each record before it is
    repeated, `execute` each plan, and `respond` may change each recorded result."""

    origin: Origin
    records: Sequence[Record]
    make_scheduler: MakeScheduler = _scheduler
    stop_at: int = -1
    begins_at_mark: bool = False
    observe: Callable[[int], None] = lambda number: None
    execute: Execute = lambda plan: None
    respond: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result
    outcome: Outcome = field(default_factory=Outcome)
    plans: dict[int, StepPlan] = field(default_factory=dict)  # in flight, by step
    last: StepPlan | None = None

    def __post_init__(self) -> None:
        self._cursor = _Cursor(records=self.records)
        config, origin = self.origin.config, self.origin
        role = _role(origin)
        self.scheduler = self.make_scheduler(config, RecordedDrafts(self._cursor) if origin.drafts else None, role)
        self.scheduler.queues.constraints = Constraints(RecordedGrammars(self._cursor))
        self.scheduler.queues.journal = self._decided
        self._halt: Halt | None = None

    def run(self) -> Outcome:
        """Give the scheduler all records. Return what came of it. Raises mark.NoMark if its state does not
        fit, and NotExecuted."""
        if self.begins_at_mark:
            self._cursor.at, marked = first_mark(self.records)
            mark.put(self.scheduler, marked.state)
        elif self.origin.state:
            self.outcome.ended = f"the engine began with {self.origin.state}, which no record has"
            return self.outcome
        while (record := self._cursor.peek()) is not None and not self._is_over:
            self.observe(self._cursor.at)
            self._cursor.at += 1
            self._give(record)
            self.scheduler.take_updates()
            self.scheduler.handoff.tickets.take_orders()
        return self.outcome

    @property
    def _is_over(self) -> bool:
        return bool(self.outcome.ended or self.outcome.difference)

    def _give(self, record: Record) -> None:
        """Repeat one call of the scheduler. Its errors are those of the recorded call."""
        if isinstance(record, _INSIDE):
            self._differ(record if isinstance(record, Planned) else None, None)
            return
        if isinstance(record, Marked | Unmarked):
            return
        if isinstance(record, Beyond):
            self.outcome.ended = f"record {self._cursor.at - 1}: {record.what}"
            return
        try:
            self._repeat(record)
        except RequestFault:
            pass
        except (ForebayError, AssertionError, KeyError, IndexError, ValueError, RuntimeError, MemoryError):
            if isinstance(self._cursor.peek(), Planned):
                raise

    def _repeat(self, record: Record) -> None:
        scheduler = self.scheduler
        match record:
            case Added():
                self._add(record)
            case Aborted():
                scheduler.abort(record.id)
            case Expired():
                scheduler.expire(record.now)
            case Planning():
                scheduler.chunk_limit = record.chunk_limit
                scheduler.plan(record.now, record.width, record.mixed_limit)
            case Committed():
                self._commit(record)
            case StepFailed():
                scheduler.fail(self.plans[record.step], _error(record.code))
                self.plans.clear()
            case Recovering():
                self.plans.clear()
                scheduler.recover(_error(record.code), scheduler.requests.get(record.culprit))
            case _:
                self._repeat_rarer(record)

    def _repeat_rarer(self, record: Record) -> None:
        scheduler = self.scheduler
        match record:
            case Transferred():
                self._take_event(record)
            case SetAside():
                scheduler.handoff.spare.set_aside(record.ticket, record.num_tokens)  # type: ignore[attr-defined]
            case AdapterChanged():
                scheduler.pools.adapters.repeat(record)
            case AdapterLost():
                end_requests_of(scheduler.queues, scheduler.outputs, record.number, _LOST)
            case _:
                self._repeat_of_cache(record)

    def _repeat_of_cache(self, record: Record) -> None:
        scheduler = self.scheduler
        match record:
            case Flushed():
                scheduler.flush_cache()
            case FlushedOn():
                scheduler.continue_flush()
            case Reclaimed():
                scheduler.reclaim_leaks()
            case Measured():
                scheduler.memory.tiers.measured(self.plans[record.step], record.seconds)
            case Unwritable():
                scheduler.memory.tiers.named(record.tier).stores = False
            case CheckEnded():
                del scheduler.queues.accounts[CHECK]
            case ChecksCleared():
                clear_checks(scheduler.pools.cache)
            case _:
                self._repeat_halt(record)

    def _repeat_halt(self, record: Record) -> None:
        scheduler = self.scheduler
        match record:
            case Halted():
                self._halt = Halt(scheduler, Mode(record.mode))
            case HaltPlanning():
                assert self._halt is not None, "a plan of a halt before a halt"
                self._halt.plan(record.now, record.width, record.mixed_limit)
            case Resumed():
                resume(scheduler, record.now)
            case Forgotten():
                (keep_cached if record.to_host else forget_caches)(scheduler, record.now)
            case Reweighed():
                weights_changed(scheduler, record.version)

    def _add(self, record: Added) -> None:
        if record.is_check:
            self.scheduler.queues.accounts[CHECK] = Account(CHECK)
        adapter = self.scheduler.pools.adapters.named(record.adapter) if record.adapter else None
        self.scheduler.add(record.request(adapter), record.now, [shown.picture() for shown in record.pictures])

    def _commit(self, record: Committed) -> None:
        plan, scheduler = self.plans.pop(record.step), self.scheduler
        scheduler.queues.step_cost = record.step_cost
        if record.stopped:
            flight = scheduler.queues.flights[0]
            reqs = [req for req, sampled in zip(flight.reqs, plan.sample_mask.tolist(), strict=True) if sampled]
            counts = record.num_new or [1] * len(record.token_ids)
            owners = [req for req, count in zip(reqs, counts, strict=True) for _ in range(count)]
            for i in record.stopped:
                _stop_at(owners[i], record.token_ids[i])
        scheduler.commit(plan, self.respond(plan, record.result()), record.now)

    def _take_event(self, record: Transferred) -> None:
        event = record.event
        if record.stopped and isinstance(event, Arrived):
            open_ticket = self.scheduler.handoff.tickets.open.get(event.ticket)
            if open_ticket and open_ticket.req:
                _stop_at(open_ticket.req, event.tail.token_id)
        self.scheduler.handoff.take(event, record.now)

    # -- what the replayed scheduler writes ----------------------------------------------------------------------------

    def _decided(self, record: Record | StepPlan) -> None:
        """Compare a plan with the recorded one; a halt plans inside its own record."""
        if isinstance(record, Planning):
            if isinstance(self._cursor.records[self._cursor.at - 1], HaltPlanning):
                self._cursor.take(Planning)
        elif isinstance(record, StepPlan):
            recorded, planned = self._cursor.take(Planned), Planned.of(record)
            if recorded is None and self._cursor.peek() is None:
                self._planned(record)  # a plan is recorded with what follows it
                return
            if recorded != planned:
                self._differ(recorded if isinstance(recorded, Planned) else None, planned)
                return
            self.outcome.num_plans += 1
            self._planned(record)

    def _planned(self, plan: StepPlan) -> None:
        self.plans[plan.step] = self.last = plan
        try:
            self.execute(plan)
        except Exception as error:  # not an error of the scheduler, which would be one of the recorded call
            raise NotExecuted(f"step {plan.step}: {error}") from error
        if plan.step == self.stop_at:
            self.outcome.ended = f"step {plan.step} is planned"

    def _differ(self, recorded: Planned | None, replayed: Planned | None) -> None:
        if self.outcome.difference is None:
            self.outcome.difference = Difference(number=self._cursor.at - 1, recorded=recorded, replayed=replayed)


def first_mark(records: Sequence[Record]) -> tuple[int, Marked]:
    """Return the first state of an idle scheduler, and the number of the record behind it. Raises NoMark for none."""
    for number, record in enumerate(records):
        if isinstance(record, Marked):
            return number + 1, record
    raise mark.NoMark("the engine was never at rest")


def _stop_at(req: Request, token: int) -> None:
    """Let a token that stands for a stop token end the request."""
    req.stop_ids |= {token}


def _error(code: str) -> ForebayError:
    return from_code("EngineError", "as recorded", code)


def lines(planned: Planned | None) -> list[str]:
    """Describe a recorded plan: its sequences, with the request that begins in a row."""
    if planned is None:
        return ["no step"]
    rows = np.frombuffer(planned.rows, dtype=np.int64).tolist()
    q_lens = np.frombuffer(planned.q_lens, dtype=np.int64).tolist()
    starts = np.frombuffer(planned.starts, dtype=np.int64).tolist()
    begins = dict(planned.admissions)
    found = [f"step {planned.step}: {len(rows)} sequences, {sum(q_lens)} tokens, other work {planned.checksum:08x}"]
    for i, (row, q_len) in enumerate(zip(rows, q_lens, strict=True)):
        what = f"prompt tokens {starts[i]} to {starts[i] + q_len}" if i < planned.num_extends else f"decodes {q_len}"
        found.append(f"  row {row}: {what}" + (f", request {begins[row]} begins" if row in begins else ""))
    return found
