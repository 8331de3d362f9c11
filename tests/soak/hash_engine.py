"""The real core, scheduler and pools with the hash model as their runner: its tokens depend on every byte that a
request may read, and cost nearly nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final

from forebay.config.engine_config import Ledger, SchedulerConfig, StateStrategy
from forebay.engine.loop.core import EngineCore
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.requests.end_tokens import EndTokens
from forebay.requests.step_plan import Launched, StepPlan
from forebay.scheduler.scheduler import Scheduler
from tests.integration.threaded import ThreadedEngine
from tests.kinds_of import kind_config
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import Pools
from tests.simulation.hashing import HashModel

VOCAB: Final = 600
EOS: Final = 2
ROWS, PAGE, CHUNK, DEPTH, WINDOW, INTERVAL = 12, 4, 32, 1, 20, 8
CONTEXT: Final = 192
PRUNE_EVERY: Final = 256  # steps


def scheduler_config(tenants: Mapping[str, int]) -> SchedulerConfig:
    """A hybrid of all kinds of layers in pools so small that requests evict and retract each other."""
    pages = window_pages_per_request(WINDOW, PAGE, DEPTH, INTERVAL)
    state = kind_config(
        num_slots=ROWS * (1 + tracking_slots(True, DEPTH)) + 10,
        strategy=StateStrategy.EXTRA_BUFFER,
        track_interval=INTERVAL,
        anchor_interval=16,
        slot_bytes={"kv": 100 * PAGE, "window": 50 * PAGE, "state": 1000},
        retraction_host_bytes=20_000,
        recompute_bytes_per_token=1 << 20,
        window=WINDOW,
        num_window_pages=ROWS * pages + window_pages_in_flight(CHUNK, PAGE, DEPTH) + 8,
    )
    return SchedulerConfig(
        page_size=PAGE,
        num_pages=160,
        max_running_requests=ROWS,
        context_length=CONTEXT,
        chunked_prefill_size=CHUNK,
        schedule_conservativeness=0.05,
        radix_cache=True,
        overlap_depth=DEPTH,
        ledger=Ledger.RAISE,
        tenants=tenants,
        kinds=state,
    )


MODEL: Final = HashModel(vocab=VOCAB, full=True, window=WINDOW, recurrent=True)


class SoakedRunner:
    """A `HashRunner` that poisons what nobody holds before each step and forgets requests that have ended."""

    def __init__(self, scheduler: Scheduler, config: SchedulerConfig) -> None:
        self._scheduler = scheduler
        self.hashes = HashRunner(config, Pools.of(scheduler.pools), MODEL, salt=lambda request_id: 0)
        self._num_steps = 0

    def launch(self, plan: StepPlan) -> Launched:
        pools, runner = self._scheduler.pools, self.hashes
        runner.check_in_flight()
        runner.poison_free([*plan.host.saves, *pools.draft.saves])
        self._num_steps += 1
        if self._num_steps % PRUNE_EVERY == 0:
            self._prune()
        return runner.launch(plan)

    def _prune(self) -> None:
        runner = self.hashes
        alive = {*self._scheduler.requests, *runner.tenant.tolist()}
        for by_request in (runner.row_of, runner.cached):
            for request_id in by_request.keys() - alive:
                del by_request[request_id]
        runner.broken &= alive


def hash_engine(tenants: Mapping[str, int] = MappingProxyType({})) -> ThreadedEngine:
    config = scheduler_config(tenants)
    scheduler = Scheduler(config)
    runner = SoakedRunner(scheduler, config)
    core = EngineCore(scheduler, runner, vocab_size=VOCAB, end_tokens=EndTokens([EOS], vocab_size=VOCAB))
    return ThreadedEngine(
        core,
        max_running_requests=ROWS,
        context_length=CONTEXT,
        page_size=PAGE,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        wants_resume_points=True,
    )


def reference(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What the model says to a prompt alone, up to and with the end token."""

    def told() -> Iterator[int]:
        for generated in islice(MODEL.generate(prompt, salt=0, seed=seed), num_tokens):
            yield generated.token_id
            if generated.token_id == EOS:
                return

    return list(told())
