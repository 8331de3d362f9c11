"""Steps beside the host: in order, with the tokens of steps that are waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.runtime import LaunchedStep
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.overlap import OverlappedRunner, StepBefore
from tests.deadlines import HANGS_S
from tests.plans import changed
from tests.runtime.fake_model import NUM_ROWS, fake_runner, planner

DRAWN = SamplingParams(temperature=1.2, top_p=0.8, repetition_penalty=1.2, seed=5, logprobs=2)


def plans_of(count: int) -> list[StepPlan]:
    plans = planner(fake_runner())
    for row in (1, 2, 3):
        plans.admit(row, [row, 2, 3, 4], DRAWN)
    made = [plans.plan(extends=[(row, 4) for row in (1, 2, 3)])]
    return made + [plans.plan(decodes=[3, 1, 2][: 1 + i % 3]) for i in range(count)]


def test_a_launch_returns_before_its_step_has_run_and_steps_run_in_order():
    runner, may_run, ran = fake_runner(), threading.Event(), []
    launch = runner.launch

    def held_back(plan: StepPlan) -> LaunchedStep:
        assert may_run.wait(HANGS_S)
        ran.append(plan.step)
        return launch(plan)

    runner.launch = held_back
    beside = OverlappedRunner(runner)
    plans = plans_of(6)
    launched = [beside.launch(plan) for plan in plans]
    assert ran == []
    may_run.set()
    results = [step.result() for step in launched]
    assert ran == [plan.step for plan in plans]
    assert results == waited_results(plans)


def waited_results(plans: list[StepPlan]) -> list[StepResult]:
    runner = fake_runner()
    return [runner.launch(plan).result() for plan in plans]


def test_what_is_wrong_with_a_plan_is_raised_by_its_result_and_fails_what_was_launched_behind_it():
    """A step behind it may build on what it did not do; one that is launched when the failure is known runs."""
    beside = OverlappedRunner(fake_runner())
    first, second, third = plans_of(2)
    wrong = changed(second, rows=np.array([NUM_ROWS + 7]))
    launched = [beside.launch(plan) for plan in (first, wrong, second)]
    assert launched[0].result().token_ids
    with pytest.raises(IndexOutOfPool, match="rows"):
        launched[1].result()
    with pytest.raises(StepBefore, match="behind one that failed"):
        launched[2].result()
    assert beside.launch(third).result().token_ids
