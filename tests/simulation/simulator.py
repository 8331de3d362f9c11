"""The real scheduler under random traffic and faults, one seed at a time, with every promise checked after each step.

python -m tests.simulation.simulator --seed 1234              replay one seed
python -m tests.simulation.simulator --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final
from unittest.mock import patch

import numpy as np

from forebay.base.errors import EngineError, Overloaded, RequestTooLarge
from forebay.config.engine_config import SchedulerConfig
from forebay.memory import anchors
from forebay.memory.slots import CACHE
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import FinishReason, Update
from forebay.scheduler import admission, scheduler
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.proposer import Proposer
from tests.kinds_of import states_of, windows_of
from tests.simulation.command_line import command_line
from tests.simulation.event_log import Outcome, log_plan
from tests.simulation.grammars import HashGrammars
from tests.simulation.hash_runner import HashRunner, StepFailed
from tests.simulation.hash_step import HashStep, Pools
from tests.simulation.hashing import salt_of
from tests.simulation.oracles import Oracles, Tracked, require
from tests.simulation.proposers import DeviceProposer, HostProposer, References
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.workload import (
    Conversations,
    Faults,
    Traffic,
    random_config,
    random_traffic,
    with_speculation,
    with_tenants,
)

# Prompts here are too short, and queues too small, for what is worth it in earnest.
CLOSE: Final = 4  # tokens between anchors
FEW: Final = 3  # overtakings
SHARED: Final = 6  # tokens of a prompt under way that are waited for
SchedulerFactory = Callable[[SchedulerConfig, Proposer | None], RetractingScheduler]


class Simulation:
    """One scheduler, one hash runner, and the loop that the engine turns: plan, launch, commit with `depth` in flight.

    `tick` lets traffic and faults happen and turns the loop once; `drain` turns it until nothing is left. Where tokens
    are drafted, `widths` decides how many and how well.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        traffic: Traffic,
        rng: Random,
        *,
        make_scheduler: SchedulerFactory = RetractingScheduler,
        widths: Random | None = None,
    ) -> None:
        self.config, self.traffic, self.rng = config, traffic, rng
        self.widths, self.most_width = widths or Random(0), config.speculation.num_draft_tokens
        model, algorithm = traffic.model(config), config.speculation.algorithm
        self.references = References(model)
        self.propose = DeviceProposer(self.widths, self.references)
        host = self.most_width > 1 and not algorithm.on_device
        self.proposer = HostProposer(self.widths, self.propose) if host else None
        self.grammars = HashGrammars(traffic.vocab)
        self.scheduler = make_scheduler(config, self.proposer)
        self.scheduler.constraints = Constraints(self.grammars)
        self.salts: dict[int, int] = {}  # by request, also of those that ended while a step computes for them
        self.runner = HashRunner(
            config,
            Pools.of(self.scheduler.held),
            model,
            salt=self.salts.__getitem__,
            propose=self.propose if algorithm.on_device else None,
            take_masks=self.grammars.take,
        )
        self.oracles = Oracles(config, self.scheduler, self.runner)
        self.scheduler.liveness = self.oracles.liveness
        self.capacity = min(config.context_length, config.num_pages * config.page_size)  # tokens, for one request
        self.conversations = Conversations(rng, traffic, self.capacity)
        self.flights: deque[tuple[StepPlan, HashStep]] = deque()
        self.faults = traffic.faults
        self.now = 0.0
        self.num_added = self.num_refused = self.num_steps = 0

    # -- traffic ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        rng, params = self.rng, self.conversations.params()
        if self.traffic.pooled and self.widths.random() < self.traffic.pooled:
            params = SamplingParams.of_pooling(Pooling(self.widths.choice(list(PoolingKind))))
        tenants = self.traffic.tenants
        tenant = self.widths.choice(tenants) if len(tenants) > 1 else tenants[0]
        again = self.conversations.again()
        prompt = again[0] if again else self.conversations.prompt(params.max_tokens)
        self.add(
            prompt,
            params,
            priority=rng.randrange(3),
            namespace=again[1] if again else rng.choice(self.traffic.namespaces),
            resume_points=self.conversations.resume_points(prompt),
            tenant=tenant,
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
    ) -> Tracked | None:
        """Submit a request; None if it was refused, which must be for the right reason."""
        self.num_added += 1
        self.salts[self.num_added] = salt = salt_of(f"{self.scheduler.weight_version}/{namespace}")
        self.references.add(self.num_added, prompt, params, salt=salt)
        req = Request(
            self.num_added,
            prompt,
            params,
            priority=priority,
            namespace=namespace,
            tenant=tenant,
            arrival=self.now,
            resume_points=resume_points,
        )
        too_large, full = self._too_large(req), self._full(req)
        try:
            self.scheduler.add(req, self.now)
        except RequestTooLarge:
            require(too_large, f"{req} would fit and was refused as too large")
        except Overloaded:
            require(full and not too_large, f"{req} was refused although the queue has room")
        else:
            require(not too_large and not full, f"{req} was let in although it should not have been")
            return self.oracles.added(req, self.now)
        self.num_refused += 1
        return None

    def _too_large(self, req: Request) -> bool:
        kv_len = req.num_prompt + req.params.max_tokens - 1
        capacity = self.config.num_pages * self.config.page_size
        num_tokens = req.num_prompt + req.params.num_generated
        return num_tokens > self.config.context_length or kv_len > capacity

    def _full(self, req: Request) -> bool:
        waiting = list(self.scheduler.waiting)
        own = sum(len(other.tokens) for other in waiting if other.tenant == req.tenant)
        living = [tracked.tenant for tracked in self.oracles.live.values()]
        queued = sum(len(other.tokens) for other in waiting)
        return self.oracles.liveness.fairness.refused(req, living, own, queued)

    def abort(self, request_id: int) -> None:
        if request_id in self.oracles.live:
            self.oracles.live[request_id].may_abort = True
        self.scheduler.abort(request_id)
        updates = self.scheduler.take_news()
        require(len(updates) <= 1, f"an abort of {request_id} ended {updates}")
        self._heard(updates)
        require(request_id not in self.oracles.live, f"request {request_id} was aborted and lives on")

    def _abort_somebody(self, plan: StepPlan | None = None) -> None:
        """Rather one for whom `plan`, just launched, does something that must not count before it has completed."""
        delicate = sorted(self._delicate(plan) & self.oracles.live.keys()) if plan else []
        live = delicate if delicate and self.rng.random() < 0.7 else sorted(self.oracles.live)
        self.abort(self.rng.choice(live) if live and self.rng.random() < 0.9 else self.num_added + 1)

    def _delicate(self, plan: StepPlan) -> set[int]:
        tenants = self.runner.tenant[plan.rows[plan.states.snap_seqs]].tolist()
        return {*tenants, *(load.request_id for load in plan.host.loads)}

    def expire(self) -> None:
        due = self.oracles.liveness.due(self.now)
        self.scheduler.expire(self.now)
        updates = self.scheduler.take_news()
        self.oracles.liveness.expired(updates, due, self.now)
        self._heard(updates)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Let things happen, then plan, launch and commit once. False when there was nothing to do."""
        rng, faults = self.rng, self.faults
        self.pass_time(rng.random() * 2 * self.traffic.tick_s)
        if rng.random() < faults.abort:
            self._abort_somebody()
        if rng.random() < faults.flush:
            self.scheduler.flush_cache()
        self.scheduler.go_on_flushing()
        windows = windows_of(self.scheduler.held)
        if windows and rng.random() < faults.windows_lost:
            windows.evict(windows.num_cached)
        if rng.random() < faults.expire:
            self.expire()
        plan = self.launch()
        if rng.random() < faults.abort:
            self._abort_somebody(plan)
        self.runner.check_in_flight()
        landing = bool(self.flights) and (plan is None or len(self.flights) > self.config.overlap_depth)
        if landing:
            self.land()
        self.oracles.check()
        return landing or plan is not None

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def width(self) -> int:
        """Of the next step."""
        return self.widths.randint(1, self.most_width) if self.most_width > 1 else 1

    def decide(self, width: int) -> StepPlan | None:
        return self.scheduler.plan(self.now, width)

    def launch(self) -> StepPlan | None:
        width = self.width()
        plan = self.decide(width)
        # Else nothing was decided, because tokens must come first, or nobody may start.
        if self.scheduler.admits and not (self.proposer and self.flights and width > 1):
            self.oracles.liveness.planned(plan, self.now)
        elif plan:
            self.oracles.liveness.launched(plan)
        self.runner.poison_free([*(plan.host.saves if plan else ()), *self.scheduler.held.draft.saves])
        if plan is None:
            return None
        self.num_steps += 1
        log_plan(self.oracles.log, plan, self.scheduler.held, self.config)
        if self.rng.random() < self._launch_fails(plan):
            self.runner.launch_in_part(plan, self.rng.random())
            for admission in [admission for admission in plan.admissions if not admission.prebuilt]:
                at = plan.rows[: plan.num_extends] == admission.row
                self.runner.cached.setdefault(admission.request_id, int(plan.starts[at][0]))
            while self.flights:  # steps end in the order they were planned
                if not self.land():
                    return plan  # void with the one that failed
            ids = [int(self.runner.tenant[row]) for row in plan.rows.tolist()]
            self._fail(plan, ids + [admission.request_id for admission in plan.admissions])
        else:
            self.flights.append((plan, self.runner.launch(plan)))
        return plan

    def _launch_fails(self, plan: StepPlan) -> float:
        """The chance of it; greater where the plan carries writes that those who live on rely on: to rows of others
        than it computes for, or to windows of cached pages."""
        chance = self.faults.launch_fails
        if not chance or not (len(plan.writes.write_rows) or len(plan.windows.map_pages)):
            return chance
        owner = self.scheduler.held.kv.owner
        others = (
            np.isin(plan.writes.write_rows, plan.rows, invert=True).any()
            or (owner[plan.windows.map_pages] == CACHE).any()
        )
        return max(chance, 0.8) if others else chance

    def land(self) -> bool:
        """Commit the oldest step; False where it failed."""
        plan, step = self.flights.popleft()
        rng, faults = self.rng, self.faults
        not_finite = {}
        if plan.num_seqs and rng.random() < faults.not_finite:
            i = rng.randrange(plan.num_seqs)
            not_finite[i] = self.widths.randrange(int(plan.q_lens[i]))
        left = any(self._is_waiting(request_id) for request_id in step.tenants.tolist())
        fails = rng.random() < faults.result_fails * (4 if left else 1)
        try:
            result = step.result(fails=fails, poisoned=not_finite)
        except StepFailed:
            self._fail(plan, step.tenants.tolist())
            return False
        self.commit(plan, step, result)
        return True

    def commit(self, plan: StepPlan, step: HashStep, result: StepResult) -> None:
        """Who failed hears what was chosen before, as it would have without drafts, and then has ended."""
        failed = [(i, int(step.tenants[i])) for i in result.failed]
        for i, tenant in failed:
            if tracked := self.oracles.live.get(tenant):
                tracked.breaks_at = len(tracked.received) + (result.num_new[i] - 1 if result.num_new else 0)
        self.scheduler.commit(plan, result, self.now)
        self.oracles.liveness.computed(plan, step, self.now)
        self._heard(self.scheduler.take_news())
        for _, tenant in failed:
            require(tenant not in self.oracles.live, f"request {tenant} was not finite and lives on")

    def _is_waiting(self, request_id: int) -> bool:
        """Whether a request was retracted while a step computed for it."""
        req = self.scheduler.requests.get(request_id)
        return req is not None and req.status is Status.WAITING

    def _fail(self, plan: StepPlan, request_ids: list[int]) -> None:
        """Only who was alone in a failed step may end with it. What was launched behind it is void."""
        if plan.num_seqs == 1:
            for request_id in request_ids:
                self._of(request_id, "may_fail")
        while self.flights:
            with suppress(StepFailed):
                self.flights.popleft()[1].result(fails=True)
        self.scheduler.fail(plan, EngineError("injected"))
        self._heard(self.scheduler.take_news())

    def _of(self, request_id: int, may: str) -> None:
        if request_id in self.oracles.live:
            setattr(self.oracles.live[request_id], may, True)

    def _heard(self, updates: list[Update]) -> None:
        for ended in self.oracles.heard(updates, self.now):
            self.conversations.remember(ended.tokens)
            if ended.may_fail and ended.finish is FinishReason.ERROR:
                self.conversations.failed(ended.prompt, ended.namespace)

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
            if not self.scheduler.idle:
                self.turn()
        self.drain()
        return self.outcome()

    def turn(self) -> None:
        """A tick that must do something when there is something to do."""
        waiting = bool(self.scheduler.requests) and not (self.flights or self.scheduler.constraints.unready)
        require(self.tick() or not waiting or not self.scheduler.requests, "nothing runs, and nothing is planned")

    def drain(self) -> int:
        """Faults and arrivals have stopped: everything must end within a bound (B-3); how many steps it took."""
        self.faults, self.scheduler.every = Faults(), 0
        limit = self.drain_limit()
        for used in range(limit):
            if self.scheduler.idle:
                self.oracles.check_drained()
                known = self.proposer.known if self.proposer else set()
                require(not known, f"whoever proposes drafts was not told that requests {known} have ended")
                return used
            self.turn()
        raise AssertionError(f"not drained after {limit} steps: {list(self.scheduler.requests.values())}")

    def drain_limit(self) -> int:
        """Each request alone: its chunks and its tokens, each with a step in flight, and as often again as it may be
        retracted."""
        chunk, retries = self.config.chunked_prefill_size, 3
        alone = sum(
            -(-len(tracked.tokens) // chunk) + tracked.params.max_tokens + 2 * self.config.overlap_depth + 2
            for tracked in self.oracles.live.values()
        )
        return 10 + retries * alone

    def outcome(self) -> Outcome:
        counters, held = self.scheduler.counters, self.scheduler.held
        hits = self.oracles.num_hits
        return Outcome(
            requests=self.num_added,
            refused=self.num_refused,
            steps=self.num_steps,
            tokens=self.oracles.num_tokens,
            drafted=int(counters["draft_tokens"]),
            accepted=int(counters["accepted_tokens"]),
            hits=hits,
            retractions=int(counters.get("retractions", 0)),
            displaced=int(counters["displaced"]),
            recomputed=int(counters.get("recomputed_tokens", 0)),
            offloaded=held.offloaded.num_saved,
            state_hits=hits if states_of(held) else 0,
            window_hits=hits if windows_of(held) else 0,
            states_taken=states_of(held).num_taken if states_of(held) else 0,
            evicted_states=states_of(held).num_evicted if states_of(held) else 0,
            digest=self.oracles.log.hexdigest(),
        )


def run_seed(seed: int, grammars: float = 0.0, restricted: float = 0.0, tenants: bool = False) -> Outcome:
    """One random configuration under random traffic. Whatever is wrong is raised, with the line that replays it. So
    many of the requests have a grammar, or may not have some tokens, as `grammars` and `restricted` say; with
    `tenants` they come from several."""
    rng, widths = Random(seed), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    make_scheduler = partial(RetractingScheduler, every=rng.choice([0, 0, 0, 3, 10]), skips=rng.random() < 0.5)
    try:
        with (
            patch.object(anchors, "MIN_DISTANCE", CLOSE),
            patch.object(admission, "MAX_OVERTAKES", FEW),
            patch.object(scheduler, "PATIENCE", FEW),
            patch.object(admission, "SHARE_WORTH_WAITING", rng.choice([SHARED, admission.SHARE_WORTH_WAITING])),
        ):
            load = replace(random_traffic(rng, config), grammars=grammars, restricted=restricted)
            load = replace(load, pooled=Random(f"{seed} pooled").choice([0.0, 0.0, 0.0, 0.4]))
            if tenants:
                config, load = with_tenants(Random(f"{seed} tenants"), config, load)
            return Simulation(config, load, rng, make_scheduler=make_scheduler, widths=widths).run()
    except Exception as error:
        error.add_note(f"{config}\nreplay: python -m tests.simulation.simulator --seed {seed}")
        raise


def run_seeds(seeds: range) -> Outcome:
    return sum(map(run_seed, seeds), Outcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.simulator", __doc__ or "", run_seed, Outcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
