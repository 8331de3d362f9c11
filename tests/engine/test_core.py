"""Plan, launch, commit at depth 0 and 1: right tokens, one end per request, failures that stay with their step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from forebay.base import fault
from forebay.base.clock import RunClock
from forebay.config.engine_config import SpeculationOptions
from forebay.engine.frames import AddRequest
from forebay.engine.loop.core import MAX_FAILURES_IN_A_ROW, EngineBroken, EngineCore
from forebay.requests.request import RequestFault
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from forebay.speculation.adaptive import Widths
from tests.engine.engine_fakes import READY, changed, fake_core, reference

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(autouse=True)
def no_fault_outlives_its_test() -> Iterator[None]:
    yield
    fault.disarm()


def wanted(request_id: int, prompt: list[int], max_tokens: int = 6, **params: object) -> AddRequest:
    sampling = msgspec.structs.replace(SamplingParams(), max_tokens=max_tokens, **params)  # what cannot be, too
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, params=sampling)


def random_requests(rng: random.Random, n: int) -> list[AddRequest]:
    return [
        wanted(i, [rng.randrange(5) for _ in range(rng.randrange(1, 90))], rng.randrange(1, 12))
        for i in range(1, n + 1)
    ]


def test_a_request_without_a_seed_gets_one_of_its_own_and_keeps_a_given_one() -> None:
    core, runner = fake_core()
    for request_id, params in enumerate([{}, {}, {"seed": -1}, {"seed": 0}, {"seed": 7}], 1):
        assert core.add(wanted(request_id, [1], **params)) == []
    core.step()
    seeds = [admission.params.seed for admission in runner.plans[0].admissions]
    assert len(set(seeds)) == 5
    assert min(seeds) >= 0
    assert seeds[3:] == [0, 7]


def test_a_greedy_request_is_the_same_each_time_since_no_seed_is_drawn_for_it() -> None:
    core, runner = fake_core()
    for request_id in (1, 2):
        assert core.add(wanted(request_id, [1], temperature=0.0)) == []
    core.step()
    first, second = [admission.params for admission in runner.plans[0].admissions]
    assert first == second == SamplingParams(max_tokens=6, temperature=0.0)


class Client:
    """Collects updates and holds every request to: tokens in order, then exactly one end, then nothing."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, Update] = {}

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            assert update.request_id not in self.ends, update
            self.tokens[update.request_id] += update.token_ids
            if update.finish is not None:
                self.ends[update.request_id] = update

    def codes(self) -> dict[int, str | None]:
        return {i: end.failure.code if end.failure else None for i, end in self.ends.items()}


def drain(core: EngineCore, client: Client, each: Callable[[], None] = lambda: None) -> None:
    for _ in range(2000):
        if core.idle:
            break
        client.take(core.step())
        each()
    assert core.idle
    core.scheduler.audit()
    assert all(pool.running == 0 and pool.quarantined == 0 for pool in core.scheduler.state(0.0).pools)


def test_a_request_keeps_the_lengths_from_which_others_may_go_on() -> None:
    core, _ = fake_core()
    core.add(msgspec.structs.replace(wanted(1, [1, 2, 3, 4]), resume_points=[2, 3]))
    assert [req.resume_points for req in core.scheduler.queues.waiting] == [[2, 3]]


@DEPTHS
@pytest.mark.parametrize("seed", range(10))
def test_every_request_gets_its_own_tokens(depth: int, seed: int) -> None:
    core, _ = fake_core(changed(overlap_depth=depth))
    requests = random_requests(random.Random(seed), 25)
    client = Client()
    for request in requests:
        client.take(core.add(request))
    drain(core, client)
    for request in requests:
        assert client.tokens[request.request_id] == reference(request.prompt_token_ids, request.params.max_tokens)
        assert client.ends[request.request_id].finish is FinishReason.LENGTH


@DEPTHS
@pytest.mark.parametrize("kind", ["runtime", "memory"])
@pytest.mark.parametrize("name", ["engine.launch", "engine.result"])
@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_a_step_that_fails_once_costs_nobody_who_was_not_alone_in_it(depth: int, kind: str, name: str, at: int) -> None:
    core, _runner = fake_core(changed(overlap_depth=depth, max_running_requests=3))
    requests = random_requests(random.Random(at), 12)
    client = Client()
    for request in requests:
        client.take(core.add(request))
    fault.arm(name, kind, at)
    drain(core, client)
    assert core.stats.counters["engine.step_failures"] == 1
    for request in requests:
        right = reference(request.prompt_token_ids, request.params.max_tokens)
        assert client.tokens[request.request_id] == right
    assert set(client.codes().values()) == {None}


@pytest.mark.parametrize("name", ["engine.result", "engine.plan"])
def test_core_recovers_while_its_reserve_of_memory_is_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27: a failed step, and a failure between steps."""
    core, _runner = fake_core(changed(max_running_requests=3))
    free: list[bool] = []
    for method in ("fail", "recover"):
        recover = getattr(core.scheduler, method)

        def watched(*args: Any, recover: Any = recover) -> Any:
            free.append(not core._reserve.is_there)
            return recover(*args)

        monkeypatch.setattr(core.scheduler, method, watched, raising=False)
    client = Client()
    for i in (1, 2, 3):
        core.add(wanted(i, [1, i]))
    fault.arm(name, "memory", 3)
    drain(core, client)
    assert free
    assert all(free)
    assert core._reserve.is_there
    assert set(client.codes().values()) == {None}


@pytest.mark.parametrize("is_known", [True, False], ids=["of one request", "of none"])
@pytest.mark.parametrize("kind", ["runtime", "memory"])
def test_core_failure_between_steps_tells_clients_what_failed_and_no_internals(
    kind: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _runner = fake_core(changed(max_running_requests=2))
    core.add(wanted(1, [1, 2]))
    [req] = core.scheduler.queues.waiting
    cause = MemoryError("pool 7") if kind == "memory" else KeyError("slot 7")

    def plan(*args: object, **others: object) -> None:
        if is_known:
            raise RequestFault(req) from cause
        raise cause

    told: list[Any] = []
    monkeypatch.setattr(core.scheduler, "plan", plan)
    monkeypatch.setattr(core.scheduler, "recover", lambda error, culprit: told.append((error, culprit)))
    core.step()
    [(error, culprit)] = told
    assert culprit is (req if is_known else None)
    what = "request 1" if is_known else "a step"
    assert error.code == ("out_of_memory" if kind == "memory" else "step_failed")
    assert error.message.startswith(f"{what} {'ran out of memory' if kind == 'memory' else 'failed inside the engine'}")
    assert "7" not in error.message


@DEPTHS
@pytest.mark.parametrize("kind", ["runtime", "memory"])
def test_who_is_alone_in_a_step_that_fails_ends_typed(depth: int, kind: str) -> None:
    core, _runner = fake_core(changed(overlap_depth=depth, max_running_requests=1))
    client = Client()
    for i in (1, 2):
        core.add(wanted(i, [1, i]))
    fault.arm("engine.result", kind, 2)
    drain(core, client)
    assert client.codes() == {1: "out_of_memory" if kind == "memory" else "step_failed", 2: None}
    assert client.tokens[2] == reference([1, 2], 6)


def test_core_widths_are_asked_for_only_while_requests_run() -> None:
    asked: list[int] = []

    class Asked(Widths):
        def width(self, num_running: int) -> int:
            asked.append(num_running)
            return super().width(num_running)

    core, _ = fake_core(changed(max_running_requests=2), widths=Asked(SpeculationOptions(num_draft_tokens=4)))
    core.add(wanted(1, [1, 2, 3], 5))
    while not core.idle:
        core.step()
    core.step()
    assert asked
    assert min(asked) == 1


@DEPTHS
def test_failing_steps_without_a_success_between_them_end_the_engine(depth: int) -> None:
    core, runner = fake_core(changed(overlap_depth=depth, max_running_requests=1))
    runner.launch = _broken  # type: ignore[method-assign]
    client = Client()
    for i in range(1, MAX_FAILURES_IN_A_ROW + 1):
        core.add(wanted(i, [1, 2]))
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        client.take(core.step())
    assert len(client.ends) == MAX_FAILURES_IN_A_ROW - 1
    with pytest.raises(EngineBroken, match="device on fire"):
        core.step()


@DEPTHS
def test_steps_that_run_out_of_memory_end_one_request_each_and_never_the_engine(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, runner = fake_core(changed(overlap_depth=depth, max_running_requests=1))
    client, num_requests = Client(), MAX_FAILURES_IN_A_ROW + 2
    with monkeypatch.context() as full:
        full.setattr(runner, "launch", _without_memory)
        for i in range(1, num_requests + 1):
            core.add(wanted(i, [1, 2]))
        drain(core, client)
    assert client.codes() == dict.fromkeys(range(1, num_requests + 1), "out_of_memory")
    core.add(wanted(num_requests + 1, [1, 2]))
    drain(core, client)
    assert client.tokens[num_requests + 1] == reference([1, 2], 6)


def _without_memory(*_: object) -> object:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _broken(*_: object) -> object:
    raise OSError("device on fire")


@DEPTHS
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("name", ["engine.plan", "engine.commit"])
def test_a_fault_between_steps_costs_nobody(name: str, at: int, depth: int) -> None:
    core, _ = fake_core(changed(overlap_depth=depth))
    client = Client()
    for i in (1, 2, 3):
        core.add(wanted(i, [1, i]))
    fault.arm(name, at=at)
    drain(core, client)
    assert {i: client.tokens[i] for i in (1, 2, 3)} == {i: reference([1, i], 6) for i in (1, 2, 3)}


def test_a_scheduler_that_always_fails_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = fake_core()
    core.add(wanted(1, [1, 2]))
    monkeypatch.setattr(core.scheduler, "plan", _broken)
    with pytest.raises(EngineBroken, match="device on fire"):
        drain(core, Client())
    assert set(caplog.messages) >= {"scheduling_failed id=unknown"}


REFUSED = {
    "an empty prompt": (wanted(1, []), "invalid_value"),
    "a prompt over the context": (wanted(1, [1] * 300), "context_length_exceeded"),
    "a prompt and output over the context": (wanted(1, [1] * 200, 100), "context_length_exceeded"),
    "a negative token id": (wanted(1, [1, -1]), "invalid_value"),
    "a token id past the vocabulary": (wanted(1, [READY.vocab_size]), "invalid_value"),
    "a token id no column holds": (wanted(1, [2**40]), "invalid_value"),
    "a stop id past the vocabulary": (wanted(1, [1], stop_token_ids=(READY.vocab_size,)), "invalid_value"),
    "a temperature that is no number": (wanted(1, [1], temperature=float("nan")), "invalid_value"),
}


@pytest.mark.parametrize(("request_", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_what_can_never_be_served_is_refused_on_arrival(request_: AddRequest, code: str) -> None:
    core, _runner = fake_core()
    client = Client()
    client.take(core.add(request_))
    assert client.codes() == {1: code}
    assert core.idle
    assert core.stats.counters["engine.refused"] == 1


def test_a_fault_while_adding_fails_that_request_only(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = fake_core()
    client = Client()
    fault.arm("engine.add", "memory", at=2)
    for i in (1, 2, 3):
        client.take(core.add(wanted(i, [i, i])))
    drain(core, client)
    assert client.codes() == {1: None, 2: "out_of_memory", 3: None}
    assert 'add_failed at="request 2"' in caplog.messages
    assert client.tokens[3] == reference([3, 3], 6)


def test_the_queue_has_an_end() -> None:
    core, _ = fake_core(changed(max_running_requests=1, max_queued_requests=2))
    client = Client()
    for i in range(1, 6):
        client.take(core.add(wanted(i, [1, 2])))
    assert set(client.codes().values()) == {"queue_full"}
    assert len(client.ends) == 2


@DEPTHS
@pytest.mark.parametrize("moment", range(12))
def test_an_aborted_request_ends_once_frees_its_pages_and_is_computed_no_more(depth: int, moment: int) -> None:
    core, runner = fake_core(changed(overlap_depth=depth, chunked_prefill_size=16))
    client = Client()
    client.take(core.add(wanted(1, list(range(60)), 20)))
    for _ in range(moment):
        client.take(core.step())
    num_plans = len(runner.plans)
    client.take(core.abort(1))
    drain(core, client)
    assert len(runner.plans) == num_plans
    assert client.ends[1].finish is FinishReason.ABORT
    assert core.abort(1) == []


@DEPTHS
@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_once_under_random_aborts_and_failures(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    core, _ = fake_core(changed(overlap_depth=depth, max_running_requests=4, max_total_tokens=160))
    requests = random_requests(rng, 25)
    client = Client()
    for request in requests:
        client.take(core.add(request))

    def trouble() -> None:
        if rng.random() < 0.05:
            fault.arm(rng.choice(["engine.launch", "engine.result"]), rng.choice(["runtime", "memory"]))
        if rng.random() < 0.2:
            client.take(core.abort(rng.randrange(1, 30)))

    drain(core, client, trouble)
    assert set(client.ends) == {request.request_id for request in requests}
    for request in requests:
        right = reference(request.prompt_token_ids, request.params.max_tokens)
        got = client.tokens[request.request_id]
        assert got == right[: len(got)]
        if client.ends[request.request_id].finish is FinishReason.LENGTH:
            assert got == right


def test_a_request_that_queues_too_long_is_told_so() -> None:
    now = [0.0]
    core, _ = fake_core(changed(max_running_requests=1), clock=lambda: now[0])
    client = Client()
    for i in (1, 2):
        client.take(core.add(wanted(i, [1, 2], 100)))
    client.take(core.step())
    now[0] = 61.0
    client.take(core.step())
    assert client.codes()[2] == "request_timeout"


def test_time_in_which_nobody_ran_ends_no_request() -> None:
    """The process was stopped for an hour: nobody has waited for it."""
    now = [100.0]
    clock = RunClock(lambda: now[0])
    core, _ = fake_core(changed(max_running_requests=1), clock=clock)
    client = Client()
    for i in (1, 2):
        client.take(core.add(wanted(i, [1, 2], 100)))
    client.take(core.step())
    now[0] += 3600.0
    client.take(core.step())
    assert not client.ends
    for _ in range(61):
        now[0] += 1.0
        clock.tick()
        client.take(core.step())
    assert client.codes() == {2: "request_timeout"}
