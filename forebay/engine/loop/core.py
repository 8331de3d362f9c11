"""The loop's body: plan, launch, commit, with `overlap_depth` steps in flight. No torch, channel or process in here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from traceback import clear_frames
from typing import Final, NamedTuple, Protocol

from forebay.base import fault
from forebay.base.errors import EngineError, ForebayError
from forebay.base.heap import Reserve, is_out_of_memory
from forebay.base.log import event, get_logger
from forebay.config.pictures import PictureConfig
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle.adapters import AdapterLoader, AdapterMemory
from forebay.engine.lifecycle.sleep import Memory, NoMemory, Sleeper
from forebay.engine.loop.cache_checks import Checks, NoChecks
from forebay.engine.loop.exchange import Connected, Exchange
from forebay.engine.loop.mixed import MixedChunks
from forebay.engine.loop.pictures import check_pictures
from forebay.engine.loop.stats import Stats
from forebay.engine.loop.step_cost import StepCost
from forebay.engine.stream import failed
from forebay.memory.adapters import AdapterLoad
from forebay.memory.cache_events import CacheEvents
from forebay.requests.end_tokens import EndTokens
from forebay.requests.request import Request, RequestFault
from forebay.requests.sampling_params import check_token_ids
from forebay.requests.step_plan import Launched, Runner, StepPlan
from forebay.requests.updates import Update
from forebay.scheduler.journal import Measured
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from forebay.speculation.adaptive import Mark, Widths

EXPIRE_INTERVAL_S: Final = 0.25
STEP_LIMIT_S: Final = 10.0  # of steps that are expected to be shorter
MAX_FAILURES_IN_A_ROW: Final = 5  # a runner that fails that often, not for memory, without one success is broken

log = get_logger("engine")


class Pace:
    """The time that a step may take before it counts as a hang, learned from steps that ended. The limit grows with a
    step's tokens, by the seconds per token of the slowest step, so that a long prompt on a slow machine is no hang.
    Until a step has ended, and at most, the limit is `most_s`."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._s_per_token: float | None = None

    def ended(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a step of `num_tokens` tokens; the slowest seconds per token count."""
        self._s_per_token = max(self._s_per_token or 0.0, seconds / max(1, num_tokens))

    def limit_s(self, num_tokens: int) -> float:
        """Return the limit of a step of `num_tokens` tokens; 0 tokens: of the time in which nothing could be planned,
        for which no step gives a measurement."""
        if self._s_per_token is None or num_tokens == 0:
            return self._most_s
        return min(self._most_s, max(STEP_LIMIT_S, num_tokens * self._s_per_token))


class Files(Protocol):
    """The files of an engine that outlast it."""

    def save(self) -> None:
        """Wait until all of it is on the disk. Raises Conflict if there are no files."""

    def close(self) -> None:
        """Write what is left, and end."""


class EngineBroken(EngineError):
    """Step after step has failed; the engine ends rather than refuse everything while looking alive."""

    default_code = "engine_broken"


class InFlight(NamedTuple):
    """A step that was launched and has not been committed."""

    plan: StepPlan
    launched: Launched
    width: int  # that it was planned with
    work: int  # in tokens


@dataclass(slots=True)
class Decoding:
    """A request that has its first token: the number of tokens since, and the state of the steps at that token."""

    begin: Mark
    num_tokens: int = 0


class EngineCore:
    """A scheduler and a runner, turned by `step`. Owned by one thread. `in_idle_time` does some deferrable work, and
    returns whether there is more. `widths` chooses how many tokens decodes compute, and measures the gain; None without
    speculation. `mixed` limits the prompts of steps in which others decode, and measures these steps; None for no limit
    by time. `adapters` has the slots of adapters, `tiers` the files of the prefix cache; `checks` compares the cache in
    idle time, `cache_events` reports it to routers. With `measures_loads` a step ends when its copies have, so that
    both are timed. `transfers` executes the orders of a scheduler with a role, `memory` is the memory that can be
    released. Each is None if this engine has none. `end_ranks` ends the processes of other ranks.

    A failing step, or another error between frames and updates, costs at most the request that caused it, which ends
    with a typed error; the others are run again without it and get the same tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        end_tokens: EndTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_idle_time: Callable[[], bool] = lambda: False,
        widths: Widths | None = None,
        mixed: MixedChunks | None = None,
        transfers: Connected | None = None,
        memory: Memory | None = None,
        adapters: AdapterMemory | None = None,
        tiers: Files | None = None,
        checks: Checks | None = None,
        cache_events: CacheEvents | None = None,
        end_ranks: Callable[[], None] = lambda: None,
        measures_loads: bool = False,
        wake_on_request: bool = False,
        keep_prefix_cache: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.sleeper = Sleeper(
            scheduler,
            memory or NoMemory(),
            clock,
            wake_on_request=wake_on_request,
            keep_prefix_cache=keep_prefix_cache,
        )
        self.in_idle_time, self.files, self.cache_events = in_idle_time, tiers, cache_events
        self.end_ranks = end_ranks
        self.checks = checks or NoChecks()
        self.adapters = None if adapters is None else _loader(scheduler, self.sleeper, adapters, clock)
        self.exchange = Exchange(scheduler, transfers) if transfers else None
        if self.exchange:
            self.sleeper.on_update = self.exchange.weights_changed
        self.stats = Stats(clock(), widths, self.exchange)
        self._runner, self._measures_loads = runner, measures_loads
        self._depth = scheduler.config.overlap_depth
        self.end_tokens = end_tokens or EndTokens(vocab_size=vocab_size)
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()
        self._widths, self._mixed = widths, mixed
        self._step_cost = StepCost(scheduler.config.chunked_prefill_size) if scheduler.config.tenants else None
        self._decoding: dict[int, Decoding] = {}  # by request, where widths are measured
        self._failures_in_a_row = 0
        self._reserve = Reserve()
        self._expire_at = 0.0
        self._pace = Pace(scheduler.config.stall_timeout_s)
        self.step_limit_s = self._pace.limit_s(0)  # of what is done now
        self._progressed = True

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, is in flight or is being flushed, and no transfer is waited for. A check of the prefix
        cache is no work."""
        return (self._without_requests or self.checks.computing) and not self.scheduler.flushing

    @property
    def _without_requests(self) -> bool:
        return self.scheduler.idle and not self.sleeper.transitions.draining

    @property
    def stuck(self) -> bool:
        """The last step could do nothing for the waiting requests: another call at once would not either."""
        return not self._progressed

    def step_age_s(self) -> float:
        """Seconds since a step last completed, 0 when there is nothing to do, or nothing is done. For any thread."""
        if self._without_requests or self.sleeper.resting:
            return 0.0
        return self._clock() - max(self.stats.last_step_at, self.sleeper.loaded_at)

    def add(self, wanted: AddRequest) -> list[Update]:
        """Queue a request. A request that is refused gets the error as its last update."""
        self._progressed = True
        stop_check(self)
        try:
            fault.point("engine.add")
            wanted.params.check(self.end_tokens.vocab_size)  # every id that will index something, whoever sent it
            check_token_ids("prompt", wanted.prompt_token_ids, self.end_tokens.vocab_size)
            if wanted.pictures:
                check_pictures(wanted.pictures, wanted.prompt_token_ids, self.scheduler.config)
            now = self._clock()
            if self._without_requests:
                self.stats.last_step_at = now  # the time without work is no delay
            request = Request(
                wanted.request_id,
                wanted.prompt_token_ids,
                wanted.params.with_seed(),
                priority=wanted.priority,
                namespace=wanted.namespace,
                author=wanted.author,
                tenant=wanted.tenant,
                eos_token_ids=self.end_tokens.ids,
                resume_points=wanted.resume_points,
                retentions=wanted.retentions,
                rendezvous=self.exchange.with_nonce(wanted.rendezvous) if self.exchange else wanted.rendezvous,
                adapter=self._adapter(wanted),
            )
            self.scheduler.add(request, now, wanted.pictures)
        except Exception as error:
            self.stats.counters["engine.refused"] += 1
            where = f"request {wanted.request_id}"
            if not isinstance(error, ForebayError):
                log.error(event("add_failed", at=where), exc_info=error)
            return [failed(wanted.request_id, _as_typed(error, where))]
        return []

    def _adapter(self, wanted: AddRequest) -> AdapterLoad | None:
        adapters = self.scheduler.pools.adapters
        return adapters.named(wanted.adapter, wanted.adapter_number) if wanted.adapter else None

    def abort(self, request_id: int) -> list[Update]:
        """End a request by exact id, at any point; nothing if it has ended or never was."""
        self._progressed = True
        try:
            self.scheduler.abort(request_id)
        except Exception as error:
            self._recover(error)
        return self._take_updates()

    def handle_transfers(self) -> list[Update]:
        """Handle the events of transfers while the engine is idle; otherwise `step` does so."""
        return self._guarded(self._handle_transfers)

    def step(self) -> list[Update]:
        """Plan and launch one step if there is one to do, and commit the oldest when enough more are in flight."""
        return self._guarded(self._turn)

    def _guarded(self, work: Callable[[], None]) -> list[Update]:
        try:
            work()
        except EngineBroken:
            raise
        except Exception as error:
            self._recover(error)
        return self._take_updates()

    def _take_updates(self) -> list[Update]:
        """With what speculation did for those that end. What transfers are to do about it goes out as well."""
        if self.exchange:
            self.exchange.submit_orders()
        updates, widths = self.scheduler.take_updates(), self._widths
        updates = self.checks.take(updates)
        if widths is None:
            return updates
        for update in updates:
            if update.cache is not None:
                self._decoding[update.request_id] = Decoding(widths.now)
            elif decoding := self._decoding.get(update.request_id):
                decoding.num_tokens += len(update.token_ids)
            if update.finish is not None and (decoding := self._decoding.pop(update.request_id, None)):
                update.speculation = widths.report(decoding.begin, decoding.num_tokens)
        return updates

    def _handle_transfers(self) -> None:
        now = self._clock()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_INTERVAL_S
            self.scheduler.expire(now)
        self.scheduler.notice_unwritable()
        if self.exchange and self.exchange.handle_events(now):
            self._progressed = True

    def _turn(self) -> None:
        self._handle_transfers()
        now = self._clock()
        flushing = self.scheduler.continue_flush()
        fault.point("engine.plan")
        width = self._width()
        plan = (self.sleeper.transitions if self.sleeper.away else self.scheduler).plan(now, width, self._mixed_limit())
        self.stats.counters["engine.host_seconds"] += self._clock() - now
        work = self._expect(plan)
        if plan is not None:
            if not (self._in_flight or self._progressed):
                self.stats.last_step_at = now  # the time in which nothing could be done is no step's
            self._launch(plan, width, work)
        if self._in_flight and (len(self._in_flight) > self._depth or plan is None):
            self._land()
        self._settle_sleeper(now)
        has_output = bool(self.scheduler.outputs.updates) or self.scheduler.handoff.tickets.has_orders
        self._progressed = plan is not None or bool(self._in_flight) or has_output or flushing
        self.stats.worked(self._clock() - now, for_check=self.checks.computing)

    def _expect(self, plan: StepPlan | None) -> int:
        """Return the work of the next step, and set the time limit for the largest of it and the steps in flight."""
        work = 0 if plan is None else work_of(plan, self.scheduler.config.pictures)
        self.step_limit_s = self._pace.limit_s(max([work, *(step.work for step in self._in_flight)]))
        return work

    def _width(self) -> int:
        """Return the number of tokens that decodes compute in the next step."""
        num_running = len(self.scheduler.queues.running)
        return self._widths.width(num_running) if self._widths and num_running else 1

    def _settle_sleeper(self, now: float) -> None:
        """Let a sleep, a wake or an update continue, once a step is committed."""
        if not self.sleeper.away:
            return
        self.sleeper.settle(now)
        if not self.sleeper.away:
            self.stats.last_step_at = self._clock()  # what memory takes is no step's time

    def _launch(self, plan: StepPlan, width: int, work: int) -> None:
        try:
            fault.point("engine.launch")
            self.stats.counters["engine.steps_ahead"] += bool(self._in_flight)
            self._in_flight.append(InFlight(plan, self._runner.launch(plan), width, work))
        except Exception as error:
            while self._in_flight:  # steps end in the order they were planned
                if not self._land():
                    return  # this one is void with the one that failed
            self._fail(plan, error)

    def _land(self) -> bool:
        """Commit the oldest step; False where it failed, and with it all those in flight."""
        plan, launched, width, work = self._in_flight.popleft()
        try:
            fault.point("engine.result")
            result = launched.result()
        except Exception as error:
            self._fail(plan, error)
            return False
        now = self._clock()
        fault.point("engine.commit")
        self.scheduler.commit(plan, result, now)
        self._failures_in_a_row = 0
        seconds = now - self.stats.last_step_at
        if work:
            self._pace.ended(work, seconds)
        if self.checks.computing:
            self.checks.measured(work, seconds)
        else:
            self._measured(plan, width, work, len(result.token_ids), seconds)
        self.stats.committed(plan.num_tokens, now, on_ranks=result.num_ranks > 1)
        self.stats.counters["engine.host_seconds"] += self._clock() - now
        return True

    def _mixed_limit(self) -> int:
        """The most prompt tokens of a step that decodes as well."""
        queues = self.scheduler.queues
        if self._mixed is None or not queues.running.reqs or not (queues.extending or queues.waiting.of):
            return NO_LIMIT
        num_requests = min(len(queues.requests), queues.config.max_running_requests)
        context = max((req.allocation.kv_bound for req in queues.extending), default=0)
        return self._mixed.limit(len(queues.running.reqs), num_requests, context)

    def _measured(self, plan: StepPlan, width: int, work: int, num_tokens: int, seconds: float) -> None:
        """Record that a step took `seconds` for `work` tokens, and brought `num_tokens`."""
        if self._measures_loads:
            _measured_loads(self.scheduler, plan, seconds)
        with_prompts = bool(plan.num_extends or plan.pictures.encodes)
        if self._widths and with_prompts:
            self._widths.mixed_ended()
        elif self._widths and plan.num_seqs:
            self._widths.ended(plan.num_seqs, width, num_tokens, seconds)
        if self._step_cost and work:
            self._step_cost.ended(work, seconds, with_prompts=with_prompts)
            self.scheduler.queues.step_cost = self._step_cost.tokens
        if self._mixed is None or not plan.num_decodes:
            return
        if with_prompts:
            num_prompt = work - plan.num_decodes
            self._mixed.mixed(plan.num_decodes, num_prompt, int(plan.starts.max(initial=0)), seconds)
        else:
            self._mixed.decoded(plan.num_decodes, seconds)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self.stats.counters["engine.step_failures"] += 1
        num_requests = len(self.scheduler.requests)
        with self._reserve.spent():
            log.error(event("step_failed", step=plan.step, seqs=plan.num_seqs, tokens=plan.num_tokens), exc_info=error)
            clear_frames(error.__traceback__)  # whose arrays may be what fills the memory
            self._abandon()
            self.scheduler.fail(plan, _as_typed(error, f"step {plan.step}"))
        if is_out_of_memory(error):
            return  # the next step may be smaller, and an engine started again would have no more memory
        # One that fails for many is followed by smaller ones, which says nothing of the runner yet.
        if len(self.scheduler.requests) < num_requests or not self.scheduler.queues.suspects.groups:
            self._count_failure(error)

    def _recover(self, error: Exception) -> None:
        """Something failed that is no step: between steps, or in taking in what one brought."""
        culprit = error.req if isinstance(error, RequestFault) else None
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        who = culprit.id if culprit else "unknown"
        with self._reserve.spent():
            log.error(event("scheduling_failed", id=who), exc_info=cause)
            clear_frames(cause.__traceback__)
            self._abandon()
            typed = _as_typed(cause, f"request {culprit.id}" if culprit else "a step")
            several = self.scheduler.recover(typed, culprit)
        self._progressed = True
        if not several:  # as for a step that failed for many
            self._count_failure(cause)

    def _abandon(self) -> None:
        """Abandon the steps in flight, which are void but may write until they have ended."""
        for step in self._in_flight:
            with suppress(Exception):
                step.launched.result()
        self._in_flight.clear()

    def _count_failure(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(
                f"{self._failures_in_a_row} steps in a row failed, the last with {type(error).__name__}: {error}"
            ) from error


def _loader(scheduler: Scheduler, sleeper: Sleeper, memory: AdapterMemory, clock: Callable[[], float]) -> AdapterLoader:
    """Make the loader of adapters, which also loads them again when the memory of the weights is new."""
    loader = AdapterLoader(scheduler, memory, clock, is_there=lambda: sleeper.has_weights)
    sleeper.on_weights = loader.read_again
    return loader


def _measured_loads(scheduler: Scheduler, plan: StepPlan, seconds: float) -> None:
    """Record the duration of a step, by which loads from other tiers of the cache are chosen."""
    if scheduler.queues.journal is not None:
        scheduler.queues.journal(Measured(plan.step, seconds))
    scheduler.memory.tiers.measured(plan, seconds)


def work_of(plan: StepPlan, pictures: PictureConfig | None) -> int:
    """Return the work of a step in tokens: its own, and what the slices of pictures cost."""
    if pictures is None or not plan.pictures.encodes:
        return plan.num_tokens
    costs = (
        pictures.layer_tokens((encode.height, encode.width), range(encode.first_layer, encode.last_layer))
        for encode in plan.pictures.encodes
    )
    return plan.num_tokens + ceil(sum(costs))


def _as_typed(error: Exception, where: str) -> ForebayError:
    """Return the error that a client may see: the kind of fault and where to look it up, without internals."""
    if isinstance(error, ForebayError):
        return error
    if is_out_of_memory(error):
        return EngineError(f"{where} ran out of memory; fewer or shorter requests may pass", code="out_of_memory")
    return EngineError(f"{where} failed inside the engine; its log has the cause", code="step_failed")


def stop_check(core: EngineCore) -> None:
    """End the check of the cache, if there is one. If that fails, its request starts over, and is ended then."""
    try:
        core.checks.stop()
    except Exception as error:
        core._recover(error)
        core.checks.stop()


def close(core: EngineCore) -> None:
    """Store what is still to be stored of the prefix cache, and end its files and other ranks. No request runs any
    more."""
    while core.scheduler.pools.draft.stores and not core.scheduler.requests:
        core.step()
    if core.files is not None:
        core.files.close()
    core.end_ranks()
