"""What goes wrong for one request, or for nobody in particular, costs the others nothing but time (C8, C27, C28)."""

from __future__ import annotations

import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace as replace_params

from forebay.base import fault
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.memory.slots import OutOfSlots, Slots
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Update
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.scheduler import Scheduler
from tests.kernels import NATIVE
from tests.kinds_of import num_states, num_window_pages, window_of
from tests.models.tiny import make_tiny, random_ids
from tests.simulation.hash_runner import HashRunner, Pools
from tests.simulation.hashing import HashModel, salt_of
from tests.simulation.rig import config, hybrid

VOCAB = 1000
CONFIGS: dict[str, SchedulerConfig] = {
    "plain": config(num_pages=24, max_running_requests=6),
    "states": hybrid("extra_buffer", spare_slots=2, num_tokens=96, host=True),
    "no_buffer": hybrid("no_buffer", spare_slots=2, num_tokens=96),
    "both": hybrid("both", spare_slots=2, num_tokens=96, host=True, overlap_depth=1),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(autouse=True)
def no_fault_outlives_its_test() -> Iterator[None]:
    yield
    fault.disarm()


class Engine:
    """A core over the hash runner, with requests of seeded prompts, of which some begin alike, and their tokens."""

    def __init__(self, asked: SchedulerConfig, *, num_requests: int = 12, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.scheduler = Scheduler(replace(asked, ledger=Ledger.COUNT))
        windows = window_of(asked.kinds) if num_window_pages(asked.kinds) else 0
        self.model = HashModel(vocab=VOCAB, window=windows, recurrent=num_states(asked.kinds) > 0)
        self.runner = HashRunner(asked, Pools.of(self.scheduler.pools), self.model, salt=lambda i: salt_of(""))
        self.now = 0.0
        self.core = EngineCore(self.scheduler, self.runner, vocab_size=VOCAB, clock=lambda: self.now)
        shared = [rng.randrange(VOCAB) for _ in range(12)]
        self.todo = [
            self.wanted(
                i,
                shared[: rng.choice([0, 4, 8, 12])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))],
                rng.randint(1, 12),
            )
            for i in range(1, num_requests + 1)
        ]
        self.asked: list[AddRequest] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, Update] = {}
        self.num_logprobs: dict[int, int] = defaultdict(int)
        self.num_prompt_logprobs: dict[int, list[int]] = defaultdict(list)

    def wanted(self, request_id: int, prompt: list[int], max_tokens: int) -> AddRequest:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
        return AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params)

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            assert update.request_id not in self.ends, update
            self.tokens[update.request_id] += update.token_ids
            self.num_logprobs[update.request_id] += len(update.logprobs or ())
            if update.prompt_logprobs is not None:
                self.num_prompt_logprobs[update.request_id].append(len(update.prompt_logprobs))
            if update.finish is not None:
                self.ends[update.request_id] = update

    def turn(self) -> None:
        self.now += 0.01
        if self.todo:
            self.asked.append(self.todo.pop(0))
            self.take(self.core.add(self.asked[-1]))
        if not self.core.idle:
            self.take(self.core.step())

    def run(self) -> None:
        """Until everything has ended; and then nothing is held, and whoever got to its end has its own tokens."""
        for _ in range(3000):
            if not self.todo and self.core.idle:
                break
            self.turn()
        assert self.core.idle
        assert set(self.ends) == {wanted.request_id for wanted in self.asked}
        self.scheduler.audit()
        assert self.scheduler.reclaim_leaks() == 0
        assert all(slots.num_violations == 0 for slots, _ in self.scheduler.pools.all)
        for wanted in self.asked:
            got = self.tokens[wanted.request_id]
            right = self.right(wanted)
            assert got == (right if not self.ends[wanted.request_id].failure else right[: len(got)])

    def right(self, wanted: AddRequest) -> list[int]:
        generated = self.model.generate(wanted.prompt_token_ids, salt=salt_of(""), seed=0)
        return [token.token_id for token in islice(generated, wanted.params.max_tokens)]

    def codes(self) -> dict[int, str]:
        return {i: end.failure.code for i, end in self.ends.items() if end.failure}


# -- failing steps ----------------------------------------------------------------------------------------------------


def fail_with(engine: Engine, guilty: set[int], *, when: str, after: int = 0) -> None:
    """Every step fails that computes for one of the guilty beyond `after` tokens."""
    launch = engine.runner.launch

    def is_hit(plan: StepPlan) -> bool:
        table = engine.scheduler.pools.table
        return any(table.request_id[row] in guilty and table.kv_bound[row] > after for row in plan.rows.tolist())

    def failing(plan: StepPlan) -> Any:
        hit = is_hit(plan)
        if hit and when == "launch":
            raise MemoryError
        step = launch(plan)
        if hit:
            result = step.result
            step.result = lambda **_: result(fails=True)  # garbage, and StepFailed
        return step

    engine.runner.launch = failing  # type: ignore[method-assign]


@pytest.mark.quick(3)
@KINDS
@pytest.mark.parametrize("when", ["launch", "result"])
@pytest.mark.parametrize("after", [0, 14])
def test_only_who_fails_alone_ends(kind: str, when: str, after: int) -> None:
    """The others have the same tokens, though live states and KV of theirs were written by steps that then failed."""
    for seed in range(4):
        engine = Engine(CONFIGS[kind], seed=seed)
        guilty = {2, 7, 8}
        fail_with(engine, guilty, when=when, after=after)
        engine.run()
        assert set(engine.codes()) <= guilty
        assert after or set(engine.codes()) == guilty
        assert set(engine.codes().values()) <= {"out_of_memory", "step_failed"}
        assert engine.scheduler.counters.get("books_cleared", 0) == 0


def test_innocents_of_a_real_model_get_their_tokens(tmp_path: Path) -> None:
    """C28, with KV, states and snapshots of a real model, and steps overlapping."""
    make_tiny("falcon_h1", tmp_path)
    prompts = {i: random_ids(20 + 7 * i, seed=i) for i in range(1, 6)}
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)

    def run(guilty: int) -> tuple[dict[int, list[int]], set[int]]:
        flags: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": 16, "context_length": 128}
        chosen = resolve({"model": str(tmp_path), **flags, "overlap_depth": 1, "kernels": NATIVE})
        core, _ = build_engine(chosen.engine)
        launch = core._runner.launch

        def failing(plan: StepPlan) -> Any:
            holders = core.scheduler.pools.table.allocations
            step = launch(plan)
            if any(getattr(holders[row], "id", 0) == guilty for row in plan.rows.tolist()) and plan.step > 4:
                return _Fails(step)
            return step

        core._runner.launch = failing  # type: ignore[method-assign]
        tokens: dict[int, list[int]] = {i: [] for i in prompts}
        failed = set()
        for i, prompt in prompts.items():
            core.add(AddRequest(request_id=i, prompt_token_ids=prompt, params=params))
        while not core.idle:
            for update in core.step():
                tokens[update.request_id] += update.token_ids
                failed |= {update.request_id} if update.failure else set()
        return tokens, failed

    right, nobody = run(guilty=0)
    assert not nobody
    tokens, failed = run(guilty=3)
    assert failed == {3}
    assert {i: tokens[i] for i in prompts if i != 3} == {i: right[i] for i in prompts if i != 3}


class _Fails:
    def __init__(self, step: Any) -> None:
        self._step = step

    def result(self) -> None:
        self._step.result()
        raise MemoryError


# -- allocations, and any line, that fail once ------------------------------------------------------------------------


class Kth:
    """Raises at the k-th call."""

    def __init__(self, k: int, error: Callable[[], Exception]) -> None:
        self.k, self.error, self.calls = k, error, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.k:
            raise self.error()


def run_with_kth_allocation_failing(kind: str, seed: int, k: int) -> bool:
    """Whether there was a k-th one."""
    engine = Engine(CONFIGS[kind], seed=seed)
    kth = Kth(k, MemoryError if k % 2 else lambda: OutOfSlots("injected", 1, 0))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("take_ids", "take_one"):
            take = getattr(Slots, name)

            def failing(self: Slots, *args: Any, take: Any = take) -> Any:
                kth()
                return take(self, *args)

            patch.setattr(Slots, name, failing)
        engine.run()
    assert len(engine.codes()) <= 1
    assert set(engine.codes().values()) <= {"out_of_memory", "step_failed"}
    return kth.calls >= k


@pytest.mark.quick(2)
@KINDS
def test_the_kth_allocation_may_fail(kind: str) -> None:
    assert all(run_with_kth_allocation_failing(kind, k % 5, k) for k in (1, 2, 3, 5, 8, 12, 17, 23, 30, 38))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_any_allocation_may_fail(kind: str, seed: int) -> None:
    k = 1
    while run_with_kth_allocation_failing(kind, seed, k):
        k += 1


def prepared_lines(function: Callable[..., Any], last: str) -> list[int]:
    """The lines of `function` up to the one with `last` in it, behind which nothing needs memory any more."""
    lines, first = inspect.getsourcelines(function)
    body = next((i for i, line in enumerate(lines) if line.rstrip().endswith('"""')), 0) + 1
    stop = next(i for i, line in enumerate(lines) if last in line)
    return [first + i for i in range(body, stop + 1) if lines[i].strip() not in ("", "try:")]


def run_with_a_line_failing(engine: Engine, function: Callable[..., Any], line: int, nth: int) -> None:
    """The nth time that `line` of `function` is to run, there is no memory."""
    kth = Kth(nth, MemoryError)

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_lineno == line:
            kth()
        return on_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: on_line if frame.f_code is function.__code__ else None)
    try:
        engine.run()
    finally:
        sys.settrace(before)
    assert kth.calls >= 1


@pytest.mark.parametrize("line", prepared_lines(OutputProcessor.append, "req.tokens.fromlist("))
@pytest.mark.parametrize("nth", [1, 4])
def test_a_token_is_told_once_with_all_that_belongs_to_it_whatever_fails(line: int, nth: int) -> None:
    engine = Engine(CONFIGS["both"])
    for i, wanted in enumerate(engine.todo):
        params = replace_params(wanted.params, prompt_logprobs=0, logprobs=0)
        engine.todo[i] = replace_params(wanted, params=params)
    run_with_a_line_failing(engine, OutputProcessor.append, line, nth)
    for wanted in engine.asked:
        assert engine.num_prompt_logprobs[wanted.request_id] == [len(wanted.prompt_token_ids)]
        assert engine.num_logprobs[wanted.request_id] == len(engine.tokens[wanted.request_id])


@pytest.mark.parametrize("code", ["self.requests[req.id] = req", "self.handoff.enqueue(req, now)"])
def test_what_could_not_be_queued_is_not_there(code: str) -> None:
    engine = Engine(CONFIGS["plain"])
    run_with_a_line_failing(engine, Scheduler.add, prepared_lines(Scheduler.add, code)[-1], 3)
    assert engine.codes() == {3: "out_of_memory"}
    assert engine.tokens[3] == []


def test_what_the_engine_cannot_take_in_for_one_ends_that_one_however_many_run() -> None:
    """Nothing says for whom it failed: it is found in halves, and that is not counted as so many failures in a row."""
    engine = Engine(config(num_pages=200, max_running_requests=40), num_requests=0)
    engine.todo = [engine.wanted(i, [i, 1, 2], 60) for i in range(1, 41)]
    append = engine.scheduler.outputs.append

    def failing(req: Request, *args: Any) -> Update:
        if req.id == 1 and not engine.todo:  # when all forty run
            raise ValueError
        return append(req, *args)

    engine.scheduler.outputs.append = failing  # type: ignore[method-assign]
    engine.run()
    assert engine.codes() == {1: "step_failed"}


def test_nothing_of_a_step_that_was_not_finite_is_kept_if_taking_it_in_fails() -> None:
    """C30: of two whose chunks were not finite the first cannot even be ended. Both run again, from the start."""
    engine = Engine(replace(CONFIGS["states"], chunked_prefill_size=64), num_requests=0)
    launch, finish = engine.runner.launch, engine.scheduler.outputs.finish
    failing = Kth(1, MemoryError)

    def poisoning(plan: StepPlan) -> Any:
        step = launch(plan)
        result = step.result
        if plan.step == 1:
            step.result = lambda **_: result(poisoned=dict.fromkeys(range(plan.num_extends), 0))  # type: ignore[method-assign]
        return step

    def finishing(*args: Any, **more: Any) -> Update:
        failing()
        return finish(*args, **more)

    engine.runner.launch = poisoning  # type: ignore[method-assign]
    engine.scheduler.outputs.finish = finishing  # type: ignore[method-assign]
    for i in (1, 2):
        engine.asked.append(engine.wanted(i, list(range(100 * i, 100 * i + 23)), 4))
        engine.take(engine.core.add(engine.asked[-1]))
    engine.run()
    assert failing.calls > 1
    assert not engine.codes()


# -- memory that is lost ----------------------------------------------------------------------------------------------


def small(**changes: Any) -> Engine:
    asked = config(num_pages=8, max_running_requests=4, chunked_prefill_size=64, context_length=64, **changes)
    return Engine(asked, num_requests=0)


def test_a_quarantined_page_does_not_count_on_arrival() -> None:
    engine = small()
    engine.scheduler.pools.kv.take_ids(1, 777)
    assert engine.scheduler.reclaim_leaks() == 1
    (update,) = engine.core.add(engine.wanted(1, list(range(20)), 12))
    assert update.failure is not None
    assert update.failure.code == "kv_capacity_exceeded"
    assert "8 KV pages of 4 tokens and there are 7" in update.failure.message
    assert engine.core.add(engine.wanted(2, list(range(20)), 8)) == []


def test_who_waits_when_memory_turns_out_to_be_lost_ends_typed_and_the_others_run() -> None:
    """A leak that nobody has found yet: the first request cannot start, on an idle engine, and is not waited for."""
    engine = small()
    engine.scheduler.pools.kv.take_ids(1, 777)
    engine.todo = [engine.wanted(1, list(range(29)), 3), *(engine.wanted(i, [i, 1, 2], 2) for i in range(2, 40))]
    for _ in range(100):
        engine.turn()
    assert engine.core.idle
    assert engine.codes() == {1: "kv_capacity_exceeded"}
    assert engine.now < 2, "long before any time-out"
    assert all(len(engine.tokens[i]) == 2 for i in range(2, 40))


def test_who_runs_when_memory_turns_out_to_be_lost_ends_typed_and_the_others_run() -> None:
    """The lone request that needs one page more than there is could neither go on nor give way to anybody."""
    engine = small()
    engine.scheduler.pools.kv.take_ids(1, 777)
    engine.todo = [engine.wanted(1, list(range(20)), 12), engine.wanted(2, [2, 1], 2)]
    for _ in range(40):
        engine.turn()
    assert engine.core.idle
    assert engine.codes() == {1: "memory_lost"}
    assert len(engine.tokens[1]) == 9
    assert len(engine.tokens[2]) == 2


@pytest.mark.parametrize("pool", ["rows", "state"])
def test_without_rows_or_states_everybody_is_told_at_once(pool: str) -> None:
    engine = Engine(hybrid("extra_buffer", max_running_requests=1, spare_slots=0), num_requests=3)
    (slots,) = (slots for slots, _ in engine.scheduler.pools.all if slots.name == pool)
    slots.take_ids(1, 1 if pool == "rows" else 777)
    for _ in range(20):
        engine.turn()
    assert engine.core.idle
    assert set(engine.codes().values()) == {"memory_lost"}
