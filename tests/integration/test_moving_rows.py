"""Rows that move between a step's launch and its result: while the host is held back, requests end, are aborted and are
admitted in their places, and each answer stays its own (C16, C27, C28; vLLM #51571, #53919)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.requests.step_plan import Launched, StepPlan, StepResult
from forebay.runtime.overlap import OverlappedRunner
from tests.integration.rig import Engine, Result
from tests.integration.test_hybrid_tokens import Known, scores
from tests.integration.test_widths import Guesses, known_of

MODELS = ("llama", "falcon_h1", "gpt_oss", "deepseek_v4")
ROUNDS = 3


@dataclass
class HeldBack:
    """A `Runner` whose host gets no result before the device has finished all steps that were launched by then."""

    inner: OverlappedRunner
    num_ahead: int = 0  # results that came behind later steps
    last: int = 0

    def launch(self, plan: StepPlan) -> Launched:
        self.last = plan.step
        return _Late(self, plan.step, self.inner.launch(plan))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class _Late:
    runner: HeldBack
    step: int
    launched: Launched

    def result(self) -> StepResult:
        self.runner.inner._thread.submit(lambda: None).result()  # a barrier behind all that is queued
        self.runner.num_ahead += self.step < self.runner.last
        return self.launched.result()


def engine_of(known: Known, width: int, *, on_host: bool, seed: int) -> tuple[Engine, HeldBack]:
    guesses = Guesses(known, seed)
    engine = known.rig.engine(
        radix_cache=True,
        width=width,
        proposer=guesses if on_host else None,
        overlap_depth=2,
        max_running_requests=3,
        page_size=4,
        cached_states=4,
    )
    scheduler, rng = engine.core.scheduler, random.Random(seed)
    plan = scheduler.plan
    scheduler.plan = lambda now, w=1, *_: plan(now, rng.choice((1, width, width)))  # type: ignore[method-assign]
    inner = engine.core._runner
    assert isinstance(inner, OverlappedRunner)
    if not on_host:
        guesses.runner = inner._runner
        guesses.runner.proposer = guesses  # type: ignore[assignment]
    engine.core._runner = held = HeldBack(inner)  # type: ignore[assignment]
    return engine, held


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    return known_of(request.param, shortest=12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("width", [2, 5, 8, 3, 4, 6, 7])
def test_c28_rows_that_move_while_the_host_is_held_back_change_no_answer(
    known: Known, width: int, on_host: bool
) -> None:
    engine, held = engine_of(known, width, on_host=on_host, seed=width)
    rng, aborted = random.Random(width), set[int]()

    def abort(number: int, result: Result) -> bool:
        if rng.random() < 0.08:
            aborted.add(number)
        return number in aborted

    count = len(known.prompts)
    for _ in range(ROUNDS):
        aborted.clear()
        results = engine.run(known.prompts * 2, known.params * 2, apart=1, abort=abort)
        for number, (found, result) in enumerate(zip(scores(results), results, strict=True)):
            tokens, logprobs = known.alone[number % count]
            own = len(result.token_ids) if number in aborted else len(tokens)
            assert found == (tokens[:own], logprobs[:own]), f"request {number}"
    assert held.num_ahead > 0, "no result was late"
    assert engine.count("accepted_tokens") > 0
