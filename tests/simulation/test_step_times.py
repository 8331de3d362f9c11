"""Steps that take virtual time by what they compute: mixed ones are cut by what others took (`--max-step-ms`), tokens
stay what they are, and no prompt stands still."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from forebay.engine.loop import mixed
from forebay.engine.loop.mixed import MixedChunks
from forebay.requests.step_plan import StepPlan
from forebay.scheduler.scheduler import NO_LIMIT
from tests.kinds_of import num_window_pages
from tests.simulation.event_log import Outcome
from tests.simulation.simulator import Simulation, scaled_down
from tests.simulation.workload import random_config, random_traffic, with_speculation

SEEDS_PER_CHUNK, CHUNKS = 7, 8
LEAST = 2  # tokens of a chunk: prompts here are short


class Limits(MixedChunks):
    """Remembers how often it limited, and what at last."""

    def __init__(self, max_step_s: float | None, page_size: int) -> None:
        super().__init__(max_step_s, page_size)
        self.num_limited, self.last = 0, NO_LIMIT

    def limit(self, num_decodes: int, num_requests: int, context: int) -> int:
        self.last = super().limit(num_decodes, num_requests, context)
        self.num_limited += self.last < NO_LIMIT
        return self.last


class TimedSimulation(Simulation):
    """A step takes `base_s`, and for each token its share; now and then much longer."""

    base_s, token_s, max_step_s = 0.001, 0.0002, None
    num_cut = 0

    def _other_parts(self) -> dict[str, Any]:
        self.times = Random(f"{self.config} times")
        self.limits = Limits(self.max_step_s, self.config.page_size)
        return {"mixed": self.limits}

    def planned(self, plan: StepPlan | None, width: int) -> None:
        super().planned(plan, width)
        limit = self.oracles.liveness.mixed_limit
        if plan is None:
            return
        prompt = int(plan.q_lens[: plan.num_extends].sum())
        if plan.num_extends and plan.num_decodes:
            assert prompt <= limit, f"{prompt} tokens beside decodes, {limit} at most"
            self.num_cut += prompt == limit < self.config.mixed_chunk_size
        assert limit >= LEAST
        slow = 20 if self.times.random() < 0.02 else 1
        self.pass_time(slow * (self.base_s + self.token_s * plan.num_tokens) * (0.9 + 0.2 * self.times.random()))


def run_timed(seed: int, max_step_s: float | None) -> tuple[Outcome, TimedSimulation]:
    rng, widths = Random(seed), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    if not num_window_pages(config.kinds):  # which are sized by chunks
        config = replace(config, chunked_prefill_size=64, mixed_chunk_size=32)
    try:
        with scaled_down():
            load = replace(random_traffic(rng, config), tick_s=0.0)
            simulation = type("Timed", (TimedSimulation,), {"max_step_s": max_step_s})(config, load, rng, widths=widths)
            return simulation.run(), simulation
    except Exception as error:
        error.add_note(f"{config}\nseed {seed}, max_step_s {max_step_s}")
        raise


@pytest.mark.quick(1)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_b1_b3_c28_steps_cut_by_their_time_end_every_request_with_the_references_tokens(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "LEAST_TOKENS", LEAST)
    num_cut = num_limited = 0
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        _, simulation = run_timed(seed, None if seed % 4 < 2 else 0.0001)  # shorter than any step: the least chunks
        num_cut += simulation.num_cut
        num_limited += simulation.limits.num_limited
    assert num_limited > 100
    assert num_cut > 3


@pytest.mark.slow
def test_b7_virtual_step_times_replay_to_the_same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "LEAST_TOKENS", LEAST)
    for seed in range(2):
        assert run_timed(seed, None)[0].digest == run_timed(seed, None)[0].digest
