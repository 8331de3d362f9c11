"""C27 for models with states and windows: steps that fail, before, in the middle of or after their work, end the
requests that were in them and change nothing for the others, those with copies in host memory above all."""

from __future__ import annotations

import random

import pytest
import torch

from forebay.engine.frames import AddRequest
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Launched, Runner, StepPlan, StepResult
from tests.integration.rig import Result, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
SHARE = 0.005  # of the steps fail in each of three ways


class Failing:
    """A runner some of whose steps fail: not begun, begun and not launched, launched and without a result."""

    def __init__(self, runner: Runner, rng: random.Random) -> None:
        self._runner, self._rng = runner, rng
        self.num_failed = 0

    def launch(self, plan: StepPlan) -> Launched:
        way = int(self._rng.random() / SHARE)
        if way < 3:
            self.num_failed += 1
        if way == 0:
            raise RuntimeError("before the step")
        launched = self._runner.launch(plan)
        if way == 1:
            raise RuntimeError("within the step")
        return WithoutResult() if way == 2 else launched


class WithoutResult:
    def result(self) -> StepResult:
        raise RuntimeError("after the step")


@pytest.fixture(scope="module", params=["falcon_h1", "gpt_oss"])
def rig(request: pytest.FixtureRequest) -> Rig:
    path = shared_tiny(request.param).path
    made = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(6))
def test_failing_steps_change_no_token_of_other_requests(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    prompts = {i: [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 12))] for i in range(1, 9)}
    engine = rig.engine(
        page_size=4,
        num_tokens=rng.choice([80, 100, 140]),
        chunked_prefill_size=rng.choice([5, 16]),
        overlap_depth=seed % 3,
        radix_cache=seed % 2 == 0,
        schedule_conservativeness=0.0,
        retraction_host_bytes=1 << 30,
    )
    core = engine.core
    core._runner = failing = Failing(core._runner, rng)
    results = {i: Result() for i in prompts}
    for i, prompt in prompts.items():
        assert core.add(AddRequest(request_id=i, prompt_token_ids=prompt, params=PARAMS)) == []
    failed = set()
    while not core.idle:
        for update in core.step():
            failed |= {update.request_id} if update.failure else set()
            results[update.request_id].take(update)
    core.scheduler.audit()
    assert (
        core.stats.counters["engine.step_failures"] == failing.num_failed
    )  # none beside those: no load found its copy gone
    for i, prompt in prompts.items():
        (alone,) = rig.engine().run([prompt], PARAMS)
        count = len(results[i].token_ids) if i in failed else None
        assert results[i].token_ids == alone.token_ids[:count]
        assert results[i].logprobs == alone.logprobs[:count]
