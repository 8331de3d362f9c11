"""The width that pays, in a simulation of what steps cost: what is lost where nothing does, and what is found where one
does. All is seeded, and time is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from forebay.config.engine_config import SpeculationOptions, SpeculativeAlgorithm
from forebay.requests.updates import SpeculationReport
from forebay.speculation.adaptive import FIRST_STEPS, PLAIN_STEPS, RECENT_STEPS, STEPS_BETWEEN_TRIALS, Mark, Widths

WIDTH = 8
LEAST = 0.97  # of the speed without guesses
Cost = Callable[[int], float]
COSTS: dict[str, Cost] = {  # seconds of a step by its tokens
    "steep": lambda tokens: 8e-3 * (1 + 0.065 * (tokens - 1)),  # the embedded model on two cores
    "flat": lambda tokens: 8e-3 * (1 + 0.01 * (tokens - 1)),
    "proportional": lambda tokens: 8e-3 * tokens,
}


def options(adaptive: bool = True) -> SpeculationOptions:
    return SpeculationOptions(
        algorithm=SpeculativeAlgorithm.NGRAM, adaptive=adaptive, num_draft_tokens=WIDTH, ngram_capacity=1
    )


class Simulation:
    """Steps of `widths`. Each request's guesses are right with probability `right` each, in a row; `guessing` is the
    share of requests that have any. Steps take what they should, but for 5 % and, one of 500, ten times as long, unless
    they are `calm`."""

    def __init__(self, cost: Cost, seed: int, widths: Widths | None = None, *, calm: bool = False) -> None:
        self.widths = widths or Widths(options())
        self.taken = Counter[int]()
        self._cost = cost
        self._calm = calm
        self._random = np.random.default_rng(seed)
        self._seconds = self._plain_s = 0.0

    @property
    def speedup(self) -> float:
        return self._plain_s / self._seconds

    def run(
        self,
        num_steps: int,
        num_running: Callable[[int], int],
        right: float,
        guessing: float = 1.0,
        slower: float = 1.0,
    ) -> float:
        """How many times as fast these steps were as without guesses. All take `slower` times as long."""
        seconds, plain_s = self._seconds, self._plain_s
        for step in range(num_steps):
            self._step(num_running(step), right, guessing, slower)
        return (self._plain_s - plain_s) / (self._seconds - seconds) if num_steps else 1.0

    def _step(self, num_running: int, right: float, guessing: float, slower: float) -> None:
        width = self.widths.width(num_running)
        guesses = (self._random.random(num_running) < guessing) * (width - 1)
        in_a_row = self._random.geometric(1 - right, num_running) - 1
        tokens = int(np.minimum(guesses, in_a_row).sum()) + num_running
        noise = self._random.uniform(0.95, 1.05) * (10 if self._random.random() < 0.002 else 1)
        noise = slower if self._calm else slower * noise
        seconds = noise * self._cost(num_running + int(guesses.sum()))
        self.widths.ended(num_running, width, tokens, seconds)
        self.taken[width] += 1
        self._seconds += seconds
        self._plain_s += noise * self._cost(num_running) * tokens / num_running


@pytest.mark.quick(8)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("num_running", [1, 4, 16, 64])
@pytest.mark.parametrize(("right", "guessing"), [(0.0, 1.0), (0.1, 1.0), (0.3, 0.3)])
def test_guesses_that_do_not_pay_cost_little(cost: str, num_running: int, right: float, guessing: float):
    for seed in range(3):
        assert Simulation(COSTS[cost], seed).run(1000, lambda step: num_running, right, guessing) > LEAST


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("num_running", [1, 4, 16, 64])
@pytest.mark.parametrize("disturbed", range(FIRST_STEPS - 1))
def test_a_long_step_at_the_beginning_is_not_taken_for_the_speed_without_guesses(
    cost: str, num_running: int, disturbed: int
):
    for seed in range(3):
        sim = Simulation(COSTS[cost], seed, calm=True)
        sim.run(disturbed, lambda step: num_running, right=0.1)
        sim.run(1, lambda step: num_running, right=0.1, slower=10.0)
        assert sim.run(300, lambda step: num_running, right=0.1) > LEAST - 0.01


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("period", [20, 100, 500])
def test_text_that_changes_whenever_a_width_was_learned_costs_little(period: int, seed: int):
    sim = Simulation(COSTS["steep"], seed)
    for _ in range(4000 // period):
        sim.run(period, lambda step: 4, right=0.95)
        sim.run(period, lambda step: 4, right=0.0)
    assert sim.speedup > 1.1


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_cost_little(seed: int):
    rng = np.random.default_rng(seed)
    running = np.clip(np.cumsum(rng.integers(-1, 2, 4000)) + 20, 1, 64)
    assert Simulation(COSTS["steep"], seed).run(4000, lambda step: int(running[step]), right=0.1) > LEAST


@pytest.mark.parametrize(
    ("cost", "num_running", "right", "width", "least"),
    [("steep", 1, 0.95, 8, 3.0), ("steep", 4, 0.8, 4, 1.5), ("flat", 64, 0.8, 4, 1.2), ("steep", 64, 0.1, 1, LEAST)],
)
def test_the_width_that_pays_most_is_found(cost: str, num_running: int, right: float, width: int, least: float):
    sim = Simulation(COSTS[cost], seed=1)
    sim.run(1000, lambda step: num_running, right)
    sim.taken.clear()
    assert sim.run(1000, lambda step: num_running, right) > least
    assert sim.taken.most_common(1)[0][0] == width


def test_a_width_that_stopped_paying_is_left_and_found_again():
    sim = Simulation(COSTS["steep"], seed=2)
    for right, width in ((0.95, 8), (0.0, 1), (0.95, 8)):
        sim.run(2000, lambda step: 1, right)
        sim.taken.clear()
        sim.run(500, lambda step: 1, right)
        assert sim.taken.most_common(1)[0][0] == width


def test_nothing_is_tried_before_plain_steps_are_known_nor_step_after_step():
    sim = Simulation(COSTS["flat"], seed=0, calm=True)
    taken = []
    for _ in range(500):
        before = sim.taken.copy()
        sim.run(1, lambda step: 1, right=0.0, guessing=0.0)  # steps of any width take the same
        taken += list((sim.taken - before).elements())
    assert taken[:FIRST_STEPS] == [1] * FIRST_STEPS
    tried = [step for step, width in enumerate(taken) if width > 1]
    assert min(np.diff(tried)) >= STEPS_BETWEEN_TRIALS


def test_a_width_that_was_asked_for_is_kept_but_for_what_measures_its_gain():
    sim = Simulation(COSTS["steep"], 0, Widths(options(adaptive=False)), calm=True)
    begin = sim.widths.now
    assert begin == Mark()
    assert sim.widths.report(begin, num_tokens=1) is None
    speedup = sim.run(50 * PLAIN_STEPS, lambda step: 4, right=0.7)
    assert sim.taken == {WIDTH: 50 * (PLAIN_STEPS - 1), 1: 50}
    per_step = sim._plain_s / COSTS["steep"](4) / (50 * PLAIN_STEPS)
    report = sim.widths.report(begin, num_tokens=round(50 * PLAIN_STEPS * per_step))
    assert report is not None
    assert report.accepted_per_step == pytest.approx(per_step, rel=0.01)
    assert report.net_speedup == pytest.approx(speedup, rel=0.05)


def test_a_report_leaves_out_steps_with_prompts():
    widths = Widths(options(adaptive=False))
    widths.ended(1, 1, 1, 0.01)
    begin = widths.now
    widths.ended(1, WIDTH, 4, 0.02)
    widths.mixed_ended()
    report = widths.report(begin, num_tokens=5)
    assert report is not None
    assert (report.accepted_per_step, report.net_speedup) == (4, pytest.approx(2.0))


def test_a_request_gains_no_more_than_its_tokens_for_each_step():
    widths = Widths(options(adaptive=False))
    for _ in range(FIRST_STEPS):
        widths.ended(1, 1, 1, 0.03)  # while the machine was busy
    begin = widths.now
    for _ in range(4):
        widths.ended(1, WIDTH, 5, 0.02)
    report = widths.report(begin, num_tokens=20)
    assert report == SpeculationReport(accepted_per_step=5.0, net_speedup=5.0)


def test_what_is_exported_is_about_recent_steps():
    widths = Widths(options(adaptive=False))
    assert widths.recent == SpeculationReport(accepted_per_step=1.0, net_speedup=1.0)
    for tokens, speedup in ((2, 1.0), (8, 4.0)):
        for _ in range(2 * RECENT_STEPS):
            widths.ended(2, 1, 2, 0.01)
            widths.ended(2, WIDTH, tokens, 0.01)
        each = (2 + tokens) / 4
        assert widths.recent.accepted_per_step == pytest.approx(each)
        assert widths.recent.net_speedup == pytest.approx((1 + speedup) / 2)


@pytest.mark.parametrize("most", [2, 3, 4, 7, 8, 16])
def test_widths_double_up_to_the_most(most: int):
    widths = Widths(SpeculationOptions(algorithm=SpeculativeAlgorithm.NGRAM, adaptive=True, num_draft_tokens=most))
    doubling = [1 << i for i in range(5) if 1 << i < most]
    assert list(widths._widths) == [*doubling, most]


def test_widths_few_buckets_serve_any_number_of_requests():
    widths = Widths(options())
    for num_running in range(1, 1025):
        widths.width(num_running)
    assert [*widths._buckets][:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert len(widths._buckets) <= 8 + 4 * 8


def test_widths_wider_and_narrower_ones_are_tried_in_turn():
    simulation = Simulation(COSTS["steep"], 3, calm=True)
    simulation.run(3000, lambda step: 4, right=0.7)
    bucket = simulation.widths._bucket(4)
    assert bucket.widths[bucket.chosen] == 4
    simulation.taken.clear()
    simulation.run(1000, lambda step: 4, right=0.7)
    assert min(simulation.taken[width] for width in (2, 8)) > 20
