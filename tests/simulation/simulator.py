"""The real scheduler under random traffic and faults, one seed at a time, with every promise checked after each step.

python -m tests.simulation.simulator --seed 1234              replay one seed
python -m tests.simulation.simulator --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from random import Random
from typing import Any, ClassVar, Final
from unittest.mock import patch

from forebay.config.engine_config import SchedulerConfig, SpeculationOptions
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle import sleep
from forebay.engine.loop import core
from forebay.engine.loop.core import EngineCore
from forebay.memory import anchors, radix_cache
from forebay.memory.adapters import AdapterLoad
from forebay.memory.retention import Retained, RetentionRequest
from forebay.requests import account
from forebay.requests.pictures import Picture
from forebay.requests.request import Request, RequestFault
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.step_plan import HostCopy, Runner, StepPlan, StepResult, TierCopy
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler import admission, recovery
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.proposer import Proposer
from forebay.speculation.adaptive import Mark, Widths
from tests.kinds_of import states_of, windows_of
from tests.simulation.command_line import command_line
from tests.simulation.event_log import Outcome, log_plan
from tests.simulation.faulty_device import Disturbance, FaultyDevice, Flight
from tests.simulation.grammars import HashGrammars
from tests.simulation.hash_runner import HashRunner, StepFailed
from tests.simulation.hash_step import Pools
from tests.simulation.hashing import NO_ROWS, Rows, salt_of
from tests.simulation.liveness import require
from tests.simulation.oracles import Oracles, Tracked, namespace_of
from tests.simulation.proposers import DeviceProposer, HostProposer, RandomWidths, References
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.workload import (
    Conversations,
    Faults,
    Traffic,
    random_config,
    random_traffic,
    retentions_of,
    with_keeping,
    with_speculation,
    with_tenants,
    with_tiers,
)

# Prompts here are too short, and queues too small, for what is worth it in earnest.
CLOSE: Final = 4  # tokens between anchors
FEW: Final = 3  # overtakings
SHARED: Final = 6  # tokens of a prompt under way that are waited for
WISHES: Final = ("id", "tokens", "priority", "namespace", "tenant", "arrival", "rendezvous")
EXPIRE_INTERVAL_S: Final = 0.03
PLACES: Final = ("hear", "plan", "planned", "commit", "abort")  # of disturbances
SchedulerFactory = Callable[[SchedulerConfig, Proposer | None], RetractingScheduler]


def _wishes_of(req: Request) -> list[Any]:
    """Return what a client asks for: sequences are lists in a frame, and may be tuples in a request."""
    return [*(getattr(req, name) for name in WISHES), list(req.resume_points), list(req.retentions)]


class Simulation:
    """One engine core over the hash runner, in virtual time, and all that it is asked for.

    `tick` lets traffic and faults happen and turns the core once; `drain` turns it until nothing is left. Where tokens
    are drafted, `widths` decides how many and how well.
    """

    make_runner: ClassVar[type[HashRunner]] = HashRunner
    make_oracles: ClassVar[type[Oracles]] = Oracles

    def __init__(
        self,
        config: SchedulerConfig,
        traffic: Traffic,
        rng: Random,
        *,
        make_scheduler: SchedulerFactory = RetractingScheduler,
        widths: Random | None = None,
    ) -> None:
        self.config, self.traffic, self.rng, self.now = config, traffic, rng, 0.0
        self.choices = widths or Random(0)
        model, algorithm = traffic.model(config), config.speculation.algorithm
        self.references = References(model)
        self.propose = DeviceProposer(self.choices, self.references)
        host = config.speculation.num_draft_tokens > 1 and not algorithm.on_device
        self.proposer = HostProposer(self.choices, self.propose, self.references, config.speculation) if host else None
        self.grammars = HashGrammars(traffic.vocab)
        self.scheduler = make_scheduler(config, self.proposer)
        self.scheduler.queues.constraints = Constraints(self.grammars)
        self.salts: dict[int, int] = {}  # by request, also of those that ended while a step computes for them
        self.runner = self.make_runner(
            config,
            Pools.of(self.scheduler.pools),
            model,
            salt=self.salts.__getitem__,
            propose=self.propose if algorithm.on_device else None,
            take_masks=self.grammars.take,
        )
        self.device = FaultyDevice(self)
        losses = Random(f"{config} losses") if config.tiers else Random(0)
        self.runner.cache_tiers.loses = lambda: losses.random() < self.faults.fetch_lost
        self.widths = self._make_widths(config.speculation)
        self.core = EngineCore(
            self.scheduler,
            self._runner_of_core(),
            vocab_size=traffic.vocab,
            clock=lambda: self.now,
            widths=self.widths,
            **self._other_parts(),
        )
        self.scheduler.watcher = self
        self.oracles = self.make_oracles(config, self.scheduler, self.runner)
        self.scheduler.liveness = self.oracles.liveness
        self.capacity = min(config.context_length, config.num_pages * config.page_size)  # tokens, for one request
        self.conversations = Conversations(rng, traffic, self.capacity)
        self.keepings = Random(f"{config} keepings") if traffic.keeping else Random(0)
        self.faults = traffic.faults
        self.disturbance: Disturbance | None = None
        self.unrecovered: tuple[str, Request | None] | None = None  # a disturbance, and for whom it was
        self.decoding: dict[int, tuple[Mark, int]] = {}  # by request, since its first token, where widths are measured
        self.num_added = self.num_refused = self.num_steps = self.num_disturbed = self.num_failed = 0

    def _make_widths(self, options: SpeculationOptions) -> Widths | None:
        return RandomWidths(options, self.choices) if options.num_draft_tokens > 1 else None

    def _runner_of_core(self) -> Runner:
        return self.device

    def _other_parts(self) -> dict[str, Any]:
        """What else the core is made with."""
        return {}

    @property
    def flights(self) -> deque[Flight]:
        return self.device.flights

    # -- traffic ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        rng, params = self.rng, self.conversations.params()
        if self.traffic.pooled and self.choices.random() < self.traffic.pooled:
            params = SamplingParams.of_pooling(Pooling(self.choices.choice(list(PoolingKind)[:3])))
        tenants = self.traffic.tenants
        tenant = self.choices.choice(tenants) if len(tenants) > 1 else tenants[0]
        again = self.conversations.again()
        prompt = again[0] if again else self.conversations.prompt(params.max_tokens)
        self.add(
            prompt,
            params,
            priority=rng.randrange(3),
            namespace=again[1] if again else rng.choice(self.traffic.namespaces),
            resume_points=self.conversations.resume_points(prompt),
            tenant=tenant,
            retentions=retentions_of(self.keepings, prompt) if self.keepings.random() < self.traffic.keeping else [],
        )

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
        resume_points: Sequence[int] = (),
        tenant: str = "",
        pictures: Sequence[Picture] = (),
        retentions: Sequence[RetentionRequest] = (),
    ) -> Tracked | None:
        """Submit a request; None if it was refused, which must be for the right reason."""
        self.num_added += 1
        req = Request(
            self.num_added,
            prompt,
            params,
            priority=priority,
            namespace=namespace,
            tenant=tenant,
            arrival=self.now,
            resume_points=resume_points,
            retentions=list(retentions),
            adapter=self._adapter(),
        )
        req.compute_with(self.scheduler.queues.weight_version)
        self.salts[req.id] = salt = salt_of(namespace_of(req))
        rows = self._rows(pictures)
        self.references.add(req.id, prompt, params, salt=salt, rows=rows)
        right = "RequestTooLarge" if self._too_large(req) else "Overloaded" if self._full(req) else ""
        refused = self._submit(req, pictures)
        right = right or self._no_room_for(req, pictures)
        kind = refused.kind if refused else ""
        require(kind == right, f"{req} was refused with {refused}, not {right or 'let in'}")
        if not refused:
            assert self.scheduler.added is not None
            return self.oracles.added(self.scheduler.added, self.now, rows)
        self.num_refused += 1
        return None

    def _adapter(self) -> AdapterLoad | None:
        """Return what computes the next request beside the weights."""
        return None

    def _rows(self, pictures: Sequence[Picture]) -> Rows:
        """Return the rows of the encodings that a prompt with these pictures reads."""
        return NO_ROWS

    def _rows_again(self, tracked: Tracked) -> Rows:
        """Return the rows that a living request reads with other weights."""
        return tracked.rows

    def _no_room_for(self, req: Request, pictures: Sequence[Picture]) -> str:
        """Return the error with which a request must be refused whose pictures do not fit."""
        return ""

    def _submit(self, req: Request, pictures: Sequence[Picture] = ()) -> Failure | None:
        """Ask the core for what `req` wants; why it is refused."""
        wanted = AddRequest(
            request_id=req.id,
            prompt_token_ids=req.tokens.tolist(),
            params=req.params,
            priority=req.priority,
            namespace=req.namespace,
            tenant=req.tenant,
            resume_points=list(req.resume_points),
            retentions=list(req.retentions),
            rendezvous=req.rendezvous,
            adapter=req.adapter.name if req.adapter else "",
            pictures=tuple(pictures),
        )
        told = self.core.add(wanted)
        if not told and not pictures:
            added = self.scheduler.added
            assert added is not None
            wishes, taken = map(_wishes_of, (req, added))
            require(wishes == taken, f"{req} wants {wishes} and has {taken}")
        return told[0].failure if told else None

    def _too_large(self, req: Request) -> bool:
        kv_len = req.num_prompt + req.params.max_tokens - 1
        capacity = self.config.num_pages * self.config.page_size
        num_tokens = req.num_prompt + req.params.num_generated
        return num_tokens > self.config.context_length or kv_len > capacity

    def _full(self, req: Request) -> bool:
        waiting = list(self.scheduler.queues.waiting)
        own = sum(len(other.tokens) for other in waiting if other.tenant == req.tenant)
        living = [tracked.tenant for tracked in self.oracles.live.values()]
        queued = sum(len(other.tokens) for other in waiting)
        return self.oracles.liveness.fairness.refused(req, living, own, queued)

    def abort(self, request_id: int) -> None:
        if request_id in self.oracles.live:
            self.oracles.live[request_id].may_abort = True
        num_disturbed = self.num_disturbed
        updates = self.core.abort(request_id)
        self._heard(updates)
        if self.num_disturbed == num_disturbed:
            require(len(updates) <= 1, f"an abort of {request_id} ended {updates}")
            require(request_id not in self.oracles.live, f"request {request_id} was aborted and lives on")

    def _abort_somebody(self) -> None:
        """Rather one for whom a step in flight does something that must not count before it has completed."""
        delicate = sorted(self._delicate() & self.oracles.live.keys())
        live = delicate if delicate and self.rng.random() < 0.7 else sorted(self.oracles.live)
        self.abort(self.rng.choice(live) if live and self.rng.random() < 0.9 else self.num_added + 1)

    def _delicate(self) -> set[int]:
        plans = [flight.plan for flight in self.flights]
        tenants = [self.runner.tenant[plan.rows[plan.kinds.state.snap_seqs]].tolist() for plan in plans]
        return {*chain(*tenants), *(load.request_id for plan in plans for load in plan.host.loads)}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Let things happen, then turn the core once. False when it launched and landed nothing."""
        rng, faults, done = self.rng, self.faults, self.device.num_done
        self.pass_time(rng.random() * 2 * self.traffic.tick_s)
        if rng.random() < faults.abort:
            self._abort_somebody()
        if rng.random() < faults.flush:
            self.scheduler.flush_cache()
            require(not self._retained(), "a prefix is kept over a flush")
        windows = windows_of(self.scheduler.pools)
        if windows and rng.random() < faults.windows_lost:
            windows.in_tree.evict(windows.num_cached)
        if rng.random() < faults.between_steps:
            self.disturb(rng)
        self._turn()
        require(not (self.core.stuck and self.flights), "a core with a step in flight says that it is stuck")
        self.runner.check_in_flight()
        self.oracles.check()
        return self.device.num_done > done

    def _turn(self) -> None:
        """One of the core. What it launched stays in flight until as many are as may be."""
        flights, steps, failed = len(self.flights), self.num_steps, self.num_failed
        rests = self.core.idle and not self.core.checks.computing
        self._heard(self.core.handle_transfers() if rests else self.core.step())
        require(self.unrecovered is None, f"nothing came of what was wrong for {self.unrecovered}")
        if self.num_steps > steps and self.num_failed == failed and not self.core.sleeper.away:
            right = min(flights + 1, max(flights, self.config.overlap_depth))  # a test may have launched more
            require(len(self.flights) == right, f"{len(self.flights)} steps are in flight and {right} should be")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def disturb(self, rng: Random, places: Sequence[str] = PLACES) -> None:
        """Something fails between two steps, or in what follows: for one request, or nobody knows for whom."""
        known = sorted(self.scheduler.requests) if rng.random() < 0.5 else []
        culprit = self.scheduler.requests[rng.choice(known)] if known else None
        self.disturbance = Disturbance(rng.choice(places), culprit)
        self._heard(self.core._guarded(partial(self.disturbed, "hear")))

    def _retained(self) -> list[Retained]:
        """Return what is kept on the device and in the tiers behind it."""
        return list(chain.from_iterable(self.scheduler.memory.tiers.retentions))

    # -- what the scheduler is called for -----------------------------------------------------------------------------

    def disturbed(self, at: str, plan: StepPlan | None = None) -> None:
        """Raise what is to go wrong there; `plan` is then not launched."""
        its = self.disturbance
        if its is None or its.at != at or not self.device.may_fail:
            return
        self.disturbance = None
        self.device.void()
        if plan:
            self.device.never_launched(plan)
        self.device.num_done += 1
        culprit = its.culprit if its.culprit and its.culprit.id in self.scheduler.requests else None
        runs = [*self.scheduler.queues.running.reqs, *self.scheduler.queues.extending]
        for req in [culprit] if culprit else runs if len(runs) == 1 else []:
            self._of(req.id, "may_fail")
        self.num_disturbed += 1
        self.unrecovered = at, culprit
        if culprit:
            raise RequestFault(culprit) from StepFailed("injected")
        raise StepFailed("injected")

    def planned(self, plan: StepPlan | None, width: int) -> None:
        if not (self.proposer and self.flights and width > 1):
            late = [found for found in self._retained() if found.until <= self.now]
            require(not late, f"{late} are kept longer than asked")
        # Else nothing was decided, because tokens must come first, or nobody may start.
        if self.scheduler.queues.admits and not (self.proposer and self.flights and width > 1):
            self.oracles.liveness.planned(plan, self.now)
        elif plan:
            self.oracles.liveness.launched(plan)
        self._launched(plan)

    def _launched(self, plan: StepPlan | None) -> None:
        """Spoil what is free, but for what the plan and the steps in flight are yet to copy from."""
        draft, plans = self.scheduler.pools.draft, [flight.plan.host for flight in self.flights]
        plans += [plan.host] if plan else []
        copies: list[HostCopy | TierCopy] = [*draft.saves, *draft.stores]
        for host in plans:
            copies += [*host.saves, *host.stores]
        self.runner.poison_free(copies)
        if plan is not None:
            self.num_steps += 1
            log_plan(self.oracles.log, plan, self.scheduler.pools, self.config)

    def committing(self, plan: StepPlan, result: StepResult) -> None:
        """Who failed hears what was chosen before, as it would have without drafts, and then has ended."""
        landed = self.device.landed
        assert landed is not None
        for i in result.failed:
            tracked = self.oracles.live.get(int(landed.tenants[i]))
            if tracked and tracked.id in self.scheduler.requests:  # else an earlier step ended it
                updates = self.scheduler.outputs.updates
                untold = sum(len(update.token_ids) for update in updates if update.request_id == tracked.id)
                new = result.num_new[i] - 1 if result.num_new else 0
                tracked.breaks_at = len(tracked.received) + untold + new

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        self.device.num_failures = 0
        landed = self.device.landed
        assert landed is not None
        self.oracles.liveness.computed(plan, landed, self.now)
        self.oracles.liveness.fairness.completed(result)
        for i in result.failed:
            tenant = int(landed.tenants[i])
            require(tenant not in self.scheduler.requests, f"request {tenant} was not finite and lives on")

    def failing(self, plan: StepPlan) -> None:
        """Only who was alone in a failed step may end with it. What was not injected is raised."""
        computed = self.device.failed.pop(plan.step, None)
        self.num_failed += 1
        if computed is None:
            raise sys.exception() or AssertionError(f"step {plan.step} did not fail")
        if plan.num_seqs == 1:
            for request_id in computed:
                self._of(request_id, "may_fail")

    def recovering(self, culprit: Request | None) -> None:
        """What was not injected is raised."""
        error = sys.exception()
        if isinstance(error, RequestFault):
            error = error.__cause__
        if not isinstance(error, StepFailed):
            raise error or AssertionError("recovery from nothing")
        require(self.unrecovered is not None and self.unrecovered[1] is culprit, f"{culprit} is blamed")
        self.unrecovered = None
        self.num_failed += 1

    def count_failure(self) -> None:
        self.device.num_failures += 1

    def expire(self, run: Callable[[], None]) -> None:
        due, told = self.oracles.liveness.due(self.now), len(self.scheduler.outputs.updates)
        run()
        self.oracles.liveness.expired(self.scheduler.outputs.updates[told:], due, self.now)

    def _of(self, request_id: int, may: str) -> None:
        if request_id in self.oracles.live:
            setattr(self.oracles.live[request_id], may, True)

    def _heard(self, updates: list[Update]) -> None:
        if self.widths:
            self._check_reports(updates, self.widths)
        for ended in self.oracles.heard(updates, self.now):
            self.conversations.remember(ended.tokens)
            if ended.may_fail and ended.finish is FinishReason.ERROR:
                self.conversations.failed(ended.prompt, ended.namespace)

    def _check_reports(self, updates: list[Update], widths: Widths) -> None:
        """What speculation did for a request counts from its first token, of its last output."""
        for update in updates:
            request_id = update.request_id
            if update.cache is not None:
                self.decoding[request_id] = widths.now, 0
            elif request_id in self.decoding:
                begin, count = self.decoding[request_id]
                self.decoding[request_id] = begin, count + len(update.token_ids)
            if update.finish is not None:
                begin, count = self.decoding.pop(request_id, (widths.now, 0))
                right = widths.report(begin, count)
                require(update.speculation == right, f"{update} reports no {right}")

    # -- whole runs ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """All requests arrive while faults happen, up to a random moment; faults go on for a while, and then everything
        drains."""
        rng, traffic = self.rng, self.traffic
        stop_at = rng.choice([traffic.num_requests, rng.randint(1, traffic.num_requests)])
        while self.num_added < stop_at:
            expected = traffic.arrivals
            while expected > 0 and self.num_added < stop_at and rng.random() < expected:
                self.arrive()
                expected -= 1
            self.turn()
        for _ in range(rng.choice([0, 20, 60])):
            if not self.core.idle:
                self.turn()
        self.drain()
        if not self.core.sleeper.away:
            self._flush()
        return self.outcome()

    def turn(self) -> None:
        """A tick that must do something when there is something to do."""
        waiting = bool(self.scheduler.requests) and not (self.flights or self.scheduler.queues.constraints.unready)
        require(self.tick() or not waiting or not self.scheduler.requests, "nothing runs, and nothing is planned")

    def drain(self) -> int:
        """Faults and arrivals have stopped: everything must end within a bound (B-3); how many steps it took."""
        self.faults, self.disturbance, self.scheduler.every = Faults(), None, 0
        limit = self.drain_limit()
        for used in range(limit):
            if self.core.idle:
                self.oracles.check_drained()
                require(not self.core._decoding, f"of {self.core._decoding} what is measured is kept for ever")
                if self.proposer:
                    self.proposer.check_drained()
                return used
            self.turn()
        raise AssertionError(f"not drained after {limit} steps: {list(self.scheduler.requests.values())}")

    def _flush(self) -> None:
        """An engine that is idle but for a flush goes on until nothing is cached."""
        self.scheduler.flush_cache()
        for _ in range(self.scheduler.pools.cache.num_pages):
            if not self.core.idle:
                self.tick()
        require(not self.scheduler.pools.cache.num_pages, "an engine with nothing else to do leaves a flush half done")

    def drain_limit(self) -> int:
        """Each request alone: its chunks and its tokens, each with a step in flight, and as often again as it may be
        retracted. A flush that is under way drops a page a step at least."""
        chunk, retries = self.config.chunked_prefill_size, 3
        alone = sum(
            -(-len(tracked.tokens) // chunk) + tracked.params.max_tokens + 2 * self.config.overlap_depth + 2
            for tracked in self.oracles.live.values()
        )
        flush = self.config.num_pages if self.scheduler.flushing else 0
        return 10 + retries * alone + flush

    def outcome(self) -> Outcome:
        counters, pools = self.scheduler.counters, self.scheduler.pools
        hits = self.oracles.num_hits
        return Outcome(
            requests=self.num_added,
            refused=self.num_refused,
            steps=self.num_steps,
            tokens=self.oracles.num_tokens,
            drafted=int(counters["draft_tokens"]),
            accepted=int(counters["accepted_tokens"]),
            found=self.proposer.num_found if self.proposer else 0,
            right=self.proposer.num_right if self.proposer else 0,
            disturbed=self.num_disturbed,
            hits=hits,
            retractions=int(counters.get("retractions", 0)),
            displaced=int(counters["displaced"]),
            recomputed=int(counters.get("recomputed_tokens", 0)),
            offloaded=self.scheduler.memory.host_copies.num_saved,
            state_hits=hits if states_of(pools) else 0,
            window_hits=hits if windows_of(pools) else 0,
            states_taken=states_of(pools).num_taken if states_of(pools) else 0,
            evicted_states=states_of(pools).in_tree.num_evicted if states_of(pools) else 0,
            prefixes_kept=int(self.scheduler.counters["prefixes_kept"]),
            prefixes_not_kept=int(self.scheduler.counters["prefixes_not_kept"]),
            given_up=pools.cache.retention.num_given_up,
            given_up_in_tiers=self.scheduler.memory.tiers.retention.num_given_up,
            fetched=self.runner.cache_tiers.num_fetched,
            lost=self.runner.cache_tiers.num_lost,
            digest=self.oracles.log.hexdigest(),
        )


@contextmanager
def scaled_down(
    share: int = admission.SHARE_WORTH_WAITING, *, expire_interval_s: float = EXPIRE_INTERVAL_S
) -> Iterator[None]:
    """Inside, constants are as small as prompts and queues are here, and what fails on purpose is not logged."""
    with (
        patch.object(anchors, "MIN_DISTANCE", CLOSE),
        patch.object(radix_cache, "_LEAVES_PER_SLICE", FEW),
        patch.object(admission, "MAX_OVERTAKES", FEW),
        patch.object(admission, "SHARE_WORTH_WAITING", share),
        patch.object(account, "PATIENCE", FEW),
        patch.object(account, "PATIENCE_S", inf),
        patch.object(core, "EXPIRE_INTERVAL_S", expire_interval_s),
        patch.object(core, "log"),
        patch.object(sleep, "log"),
        patch.object(recovery, "log"),
    ):
        yield


def run_seed(
    seed: int,
    grammars: float = 0.0,
    restricted: float = 0.0,
    tenants: bool = False,
    tiers: bool = False,
    keeping: bool = False,
    make: type[Simulation] = Simulation,
) -> Outcome:
    """One random configuration under random traffic. Whatever is wrong is raised, with the line that replays it. So
    many of the requests have a grammar, or may not have some tokens, as `grammars` and `restricted` say; with
    `tenants` they come from several, with `tiers` the prefix cache has tiers behind the device, and with `keeping`
    clients want prefixes kept. `make` makes the simulation."""
    rng, widths = Random(seed), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    make_scheduler = partial(RetractingScheduler, every=rng.choice([0, 0, 0, 3, 10]), skips=rng.random() < 0.5)
    try:
        with scaled_down(rng.choice([SHARED, admission.SHARE_WORTH_WAITING])):
            load = replace(random_traffic(rng, config), grammars=grammars, restricted=restricted)
            load = replace(load, pooled=Random(f"{seed} pooled").choice([0.0, 0.0, 0.0, 0.4]))
            if tenants:
                config, load = with_tenants(Random(f"{seed} tenants"), config, load)
            if tiers:
                config, load = with_tiers(Random(f"{seed} tiers"), config, load)
            if keeping:
                config, load = with_keeping(Random(f"{seed} keeping"), config, load)
            return make(config, load, rng, make_scheduler=make_scheduler, widths=widths).run()
    except Exception as error:
        error.add_note(f"{config}\nreplay: python -m tests.simulation.simulator --seed {seed}")
        raise


def run_seeds(seeds: range) -> Outcome:
    return sum(map(run_seed, seeds), Outcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.simulator", __doc__ or "", run_seed, Outcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
