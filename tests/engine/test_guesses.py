"""The core with guesses: widths are asked for, steps are learned from, and a request's end says what was gained."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from forebay.base import fault
from forebay.config.engine_config import SpeculationOptions, SpeculativeAlgorithm
from forebay.engine.loop.core import EngineCore
from forebay.requests.request import Request
from forebay.requests.updates import FinishReason
from forebay.speculation.adaptive import Widths
from forebay.speculation.ngram import Ngram
from tests.engine.engine_fakes import PrefixRunner, changed, fake_core, reference
from tests.engine.test_core import Client, drain, no_fault_outlives_its_test, random_requests, wanted

__all__ = ["no_fault_outlives_its_test"]

WIDTH = 4
STEP_S = 0.01


class Oracle:
    """Knows what comes next; every `wrong`-th guess is another token."""

    def __init__(self, wrong: int = 0) -> None:
        self.known: set[int] = set()
        self._wrong = wrong
        self._guesses = itertools.count(1)

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        self.known.add(req.id)
        right = reference(req.tokens.tolist(), most)
        return [token + (self._wrong > 0 and next(self._guesses) % self._wrong == 0) for token in right]

    def ended(self, req: Request) -> None:
        self.known.discard(req.id)


class Ticks:
    """A clock that a step of any width moves by `STEP_S`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(PrefixRunner):
    clock: Ticks

    def launch(self, plan):  # type: ignore[no-untyped-def]
        self.clock.now += STEP_S
        return super().launch(plan)


def guessing(proposer: Oracle | Ngram, *, adaptive: bool = False, **values: object) -> EngineCore:
    options = SpeculationOptions(
        algorithm=SpeculativeAlgorithm.NGRAM, adaptive=adaptive, num_draft_tokens=WIDTH, ngram_capacity=100
    )
    clock = Ticks()
    core, runner = fake_core(changed(**values), proposer=proposer, widths=Widths(options), clock=clock)
    runner.__class__, runner.clock = Timed, clock  # type: ignore[attr-defined]
    return core


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("wrong", [0, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_c16_every_request_gets_its_own_tokens(seed: int, wrong: int, adaptive: bool) -> None:
    oracle = Oracle(wrong)
    core = guessing(oracle, adaptive=adaptive)
    requests, client = random_requests(random.Random(seed), 25), Client()
    for request in requests:
        client.take(core.add(request))
    drain(core, client)
    for request in requests:
        assert client.tokens[request.request_id] == reference(request.prompt_token_ids, request.params.max_tokens)
        assert client.ends[request.request_id].finish is FinishReason.LENGTH
    assert oracle.known == set()
    assert core._decoding == {}
    assert adaptive or core.scheduler.counters["accepted_tokens"] > 0


@pytest.mark.parametrize("name", ["engine.launch", "engine.result"])
@pytest.mark.parametrize("at", [2, 4, 9])
def test_c16_a_step_with_guesses_that_fails_costs_no_token(name: str, at: int) -> None:
    core, client = guessing(Oracle(wrong=3), max_running_requests=3), Client()
    requests = random_requests(random.Random(at), 12)
    for request in requests:
        client.take(core.add(request))
    fault.arm(name, "runtime", at)
    drain(core, client)
    assert core.stats.counters["engine.step_failures"] == 1
    for request in requests:
        assert client.tokens[request.request_id] == reference(request.prompt_token_ids, request.params.max_tokens)


def test_a_stop_id_and_an_abort_inside_guesses_end_there() -> None:
    core, client = guessing(Oracle()), Client()
    stop = reference([1, 2, 3], 6)[5]
    client.take(core.add(wanted(1, [1, 2, 3], 40, stop_token_ids=(stop,))))
    client.take(core.add(wanted(2, [4, 5], 40)))
    for _ in range(3):
        client.take(core.step())
    client.take(core.abort(2))
    drain(core, client)
    assert client.tokens[1] == reference([1, 2, 3], 6)
    assert client.ends[1].finish is FinishReason.STOP
    assert client.tokens[2] == reference([4, 5], 40)[: len(client.tokens[2])]
    assert core._decoding == {}


def test_a_request_s_end_says_what_guessing_gained() -> None:
    """Every step takes as long, so that four tokens a step are four times as fast."""
    core, client = guessing(Oracle()), Client()
    client.take(core.add(wanted(1, [1, 2, 3], 250 - 3)))
    drain(core, client)
    report = client.ends[1].speculation
    assert report is not None
    assert report.accepted_per_step == pytest.approx(WIDTH, rel=0.05)
    state = core.stats.frame(core.scheduler, 0.0)
    assert state.speculation is not None
    assert state.speculation.recent.accepted_per_step == pytest.approx(WIDTH, rel=0.05)
    assert state.counters["accepted_tokens"] <= state.counters["draft_tokens"]
    for request_id in range(2, 6):  # by now a step of width 1 has told what one takes
        client.take(core.add(wanted(request_id, [request_id], 200)))
        drain(core, client)
    last = client.ends[5].speculation
    assert last is not None
    assert last.net_speedup == pytest.approx(WIDTH, rel=0.1)
    assert "spec_net_speedup=" in core.stats.line(core.scheduler, 0.0)


def test_auto_finds_the_width_while_requests_come_and_go() -> None:
    core, client = guessing(Oracle(), adaptive=True), Client()
    for request_id in range(1, 8):
        client.take(core.add(wanted(request_id, [request_id], 200)))
        drain(core, client)
    first, last = (client.ends[request_id].speculation for request_id in (1, 7))
    assert first is not None
    assert last is not None
    assert last.net_speedup > 0.8 * WIDTH > first.net_speedup >= 0.97


def test_nothing_is_told_of_guesses_where_there_are_none() -> None:
    core, _ = fake_core()
    client = Client()
    client.take(core.add(wanted(1, [1, 2, 3])))
    drain(core, client)
    assert client.ends[1].speculation is None
    assert core.stats.frame(core.scheduler, 0.0).speculation is None
    assert "spec" not in core.stats.line(core.scheduler, 0.0)


def test_ngram_guesses_what_another_request_has_said() -> None:
    core, client = guessing(Ngram(SpeculationOptions(ngram_capacity=100))), Client()
    for request_id in (1, 2):
        client.take(core.add(wanted(request_id, [7, 8, 9], 40)))
        drain(core, client)
    first, second = (client.ends[request_id].speculation for request_id in (1, 2))
    assert client.tokens[1] == client.tokens[2] == reference([7, 8, 9], 40)
    assert first is not None
    assert second is not None
    assert second.accepted_per_step > 2 > first.accepted_per_step
