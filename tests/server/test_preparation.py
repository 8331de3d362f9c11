"""Turns at the work before admission: by tenant, charged, and only for clients that are there (C32)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from queue import SimpleQueue
from typing import Any

import pytest

from forebay.base.confined import NoAnswer, Processes, Stop, Stopped, stopped_by
from forebay.base.errors import InvalidRequest, Overloaded
from forebay.grammar.checking import GrammarChecks
from forebay.http.lifecycle import ClientGone, Watch
from forebay.http.preparation import CREDIT_S, SPARE, Client, Lane, Preparation, Turn
from forebay.http.workers import INLINE_CHARS, TextWorkers, Workers
from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.deadlines import HANGS_S


class Bench:
    """A preparation whose clock stands still unless a test moves it, and clients that leave when a test says so."""

    def __init__(self, weights: dict[str, int] | None = None) -> None:
        self.now = 0.0
        self.preparation = Preparation({**dict.fromkeys("abcd", 1), **(weights or {})}, lambda: self.now)
        self._num_clients = 0

    def client(self, tenant: str, arrived_at: float | None = None) -> Client:
        self._num_clients += 1

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        left = asyncio.Event()
        client = Client(Watch(receive), tenant, self._num_clients if arrived_at is None else arrived_at)
        client.watch.start()
        self.leave = left.set
        return client

    def wait(self, lane: Lane, tenants: str, begun: list[str]) -> list[asyncio.Task[Turn]]:
        """Clients that wait for a turn each; `begun` gets the names of their tenants as their turns begin."""

        async def take(client: Client) -> Turn:
            turn = await lane.turn(client)
            begun.append(client.tenant)
            return turn

        return [asyncio.create_task(take(self.client(tenant))) for tenant in tenants]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, HANGS_S))


async def served(bench: Bench, tenants: str, seconds: dict[str, float], num: int) -> list[str]:
    """The tenants of the first turns to begin in a lane of one place, in which a tenant's turn takes its seconds."""
    lane, begun = bench.preparation.lane("test", 1), list[str]()
    tasks = bench.wait(lane, tenants, begun)
    ends: dict[Turn, float] = {}
    while len(begun) < num:
        await settle()
        turns = {task.result() for task in tasks if task.done()}
        tasks = [task for task in tasks if not task.done()]
        ends |= {turn: turn.began_at + seconds[turn.tenant] for turn in turns}
        turn = min(ends, key=lambda turn: ends[turn])
        bench.now = ends.pop(turn)
        turn.end()
    await settle()
    begun_now = [*ends, *(task.result() for task in tasks if task.done())]
    for task in tasks:
        task.cancel()
    await settle()
    for turn in begun_now:
        turn.end()
    return begun[:num]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_c32_lane_tenant_with_long_turns_has_fewer_of_them() -> None:
    async def main() -> None:
        begun = await served(Bench(), "a" * 60 + "b" * 60, {"a": 4.0, "b": 1.0}, 50)
        assert begun.count("b") == pytest.approx(4 * begun.count("a"), abs=6)

    run(main())


def test_c32_lane_tenants_are_served_by_their_weights() -> None:
    async def main() -> None:
        begun = await served(Bench({"a": 3, "b": 1}), "a" * 90 + "b" * 90, {"a": 1.0, "b": 1.0}, 80)
        assert begun.count("b") == pytest.approx(20 + CREDIT_S, abs=2)

    run(main())


@pytest.mark.parametrize("width", [1, 2, 64])
def test_c32_lane_full_of_one_tenant_serves_another_at_once(width: int) -> None:
    async def main() -> None:
        bench, begun = Bench(), list[str]()
        lane = bench.preparation.lane("test", width)
        tasks = bench.wait(lane, "a" * (width + 3), begun)
        await settle()
        assert begun == ["a"] * width
        tasks += bench.wait(lane, "bb", begun)
        await settle()
        assert begun == ["a"] * width + ["b"] * SPARE
        for task in tasks:
            task.cancel()

    run(main())


def test_c32_lane_tenant_that_was_idle_has_no_credit() -> None:
    async def main() -> None:
        bench = Bench()
        await served(bench, "a" * 40, {"a": 1.0}, 30)
        begun = await served(bench, "a" * 20 + "b" * 20, {"a": 1.0, "b": 1.0}, 20)
        assert begun.count("b") == pytest.approx(10, abs=1)

    run(main())


@pytest.mark.parametrize(("ahead_s", "begins"), [(CREDIT_S - 0.5, True), (CREDIT_S + 0.5, False)])
def test_c32_lane_tenant_served_far_more_than_others_gets_no_spare_place(ahead_s: float, begins: bool) -> None:
    """Else tenants that are always there would have one place each, whatever their weights."""

    async def main() -> None:
        bench, begun = Bench({"a": 1000}), list[str]()
        lane, other = bench.preparation.lane("test", 1), bench.preparation.lane("other", 1)
        await lane.turn(bench.client("a"))
        elsewhere = await other.turn(bench.client("b"))
        bench.now += ahead_s
        tasks = bench.wait(lane, "b", begun)
        await settle()
        assert begun == ["b"] * begins
        for task in tasks:
            task.cancel()
        elsewhere.end()

    run(main())


def test_c32_lanes_charge_one_account() -> None:
    """A tenant whose images took long waits for others with its texts."""

    async def main() -> None:
        bench, begun = Bench(), list[str]()
        images, texts = bench.preparation.lane("image", 2), bench.preparation.lane("text", 1)
        busy, held = await texts.turn(bench.client("c")), await texts.turn(bench.client("d"))  # one has the spare place
        tasks = bench.wait(texts, "ab", begun)
        await settle()
        picture = await images.turn(bench.client("a"))
        bench.now += 6.0
        picture.end()
        assert (bench.preparation.service("a"), bench.preparation.service("b")) == (3.0, 0.0)
        busy.end()
        await settle()
        held.end()
        await settle()
        assert begun == ["b"]
        tasks[1].result().end()
        await settle()
        assert begun == ["b", "a"]
        for task in tasks:
            task.cancel()

    run(main())


def test_lane_request_that_arrived_first_is_next_of_its_tenant() -> None:
    """So that images of early requests do not wait for those of all later ones."""

    async def main() -> None:
        bench, begun = Bench(), list[int]()
        lane = bench.preparation.lane("test", 1)
        first = await lane.turn(bench.client("a"))

        async def take(arrived_at: int) -> None:
            (await lane.turn(bench.client("a", arrived_at))).end()
            begun.append(arrived_at)

        tasks = [asyncio.create_task(take(at)) for at in (7, 5, 9, 5)]
        await settle()
        first.end()
        await asyncio.gather(*tasks)
        assert begun == [5, 5, 7, 9]

    run(main())


def test_c32_full_lane_refuses_the_tenant_that_fills_it_and_takes_others() -> None:
    async def main() -> None:
        bench = Bench()
        lane = bench.preparation.lane("test", 1, max_waiting=8)
        tasks = bench.wait(lane, "a" * 9, [])
        await settle()
        with pytest.raises(Overloaded, match="8 requests wait for a free test worker"):
            await lane.turn(bench.client("a"))
        tasks += bench.wait(lane, "b" * 5, [])
        await settle()
        with pytest.raises(Overloaded, match="4 requests wait"):
            await lane.turn(bench.client("b"))
        for task in tasks:
            task.cancel()

    run(main())


# -- clients that leave -----------------------------------------------------------------------------------------------


def test_c27_lane_client_that_leaves_while_it_waits_takes_no_turn() -> None:
    async def main() -> None:
        bench, begun = Bench(), list[str]()
        lane = bench.preparation.lane("test", 1)
        first = await lane.turn(bench.client("a"))
        (gone,) = bench.wait(lane, "b", begun)
        leave = bench.leave
        waiting = bench.wait(lane, "b", begun)
        await settle()
        assert begun == ["b"]  # in the spare place
        leave()
        await settle()
        gone.result().end()
        third = bench.wait(lane, "b", begun)
        leave = bench.leave
        await settle()
        leave()
        await settle()
        with pytest.raises(ClientGone):
            third[0].result()
        first.end()
        await settle()
        assert begun == ["b", "b"]
        waiting[0].result().end()
        assert (await lane.turn(bench.client("b"))).waits is False

    run(main())


def test_c27_workers_client_that_leaves_ends_its_process_and_frees_its_place_afterwards() -> None:
    async def main() -> None:
        bench = Bench()
        processes = Processes(FakeProcess)
        pool = Workers(bench.preparation.lane("test", 1))

        def work() -> None:
            with processes.one() as process:
                process.exchange()

        client, leave = bench.client("a"), bench.leave
        task = asyncio.create_task(pool.run(client, work))
        process = await asyncio.to_thread(FakeProcess.started.get)
        leave()
        with pytest.raises(ClientGone):
            await task
        assert await asyncio.to_thread(process.killed.wait, HANGS_S)
        assert await pool.run(bench.client("a"), lambda: 7) == 7
        assert process.has_ended
        assert not processes.living
        pool.close()

    run(main())


def test_workers_call_over_its_time_ends_its_process() -> None:
    async def main() -> None:
        bench = Bench()
        processes, pool = Processes(FakeProcess), Workers(bench.preparation.lane("test", 1))

        def work() -> None:
            with processes.one() as process:
                process.exchange()

        with pytest.raises(TimeoutError):
            await pool.run(bench.client("a"), work, 0.01)
        process = await asyncio.to_thread(FakeProcess.started.get)
        assert await asyncio.to_thread(process.killed.wait, HANGS_S)
        pool.close()

    run(main())


class FakeProcess:
    """Works until it is killed."""

    started: Any = None

    def __init__(self) -> None:
        self.killed = threading.Event()
        self.has_ended = False
        FakeProcess.started.put(self)

    def exchange(self) -> None:
        assert self.killed.wait(HANGS_S)
        raise NoAnswer("crashed")

    def kill(self) -> None:
        self.killed.set()

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(FakeProcess, "started", SimpleQueue())


def test_process_killed_behind_its_answer_is_not_used_again() -> None:
    """Else the next one to use it is told that its own question crashed the process."""
    processes, stop = Processes(FakeProcess), Stop()
    with pytest.raises(Stopped), stopped_by(stop), processes.one() as process:
        stop.set()
    assert process.has_ended
    with pytest.raises(Stopped), stopped_by(stop), processes.one():
        raise AssertionError("a call that was stopped goes on")
    with processes.one() as another:
        assert another is not process


def test_stopped_check_of_a_grammar_is_not_remembered_as_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: Processes[FakeProcess] = Processes(FakeProcess)
    checks, grammar, stop = GrammarChecks(lambda: None), Grammar(GrammarKind.REGEX, "a+"), Stop()  # type: ignore[arg-type,return-value]
    checks._processes = processes  # type: ignore[assignment]

    def exchange(self: FakeProcess, question: bytes, timeout_s: float) -> bytes:
        stop.set()
        raise NoAnswer("crashed")

    monkeypatch.setattr(FakeProcess, "exchange", exchange)
    with pytest.raises(Stopped), stopped_by(stop):
        checks.check(grammar)
    assert not checks.recall(grammar)
    with pytest.raises(InvalidRequest, match="crashed"):
        checks.check(grammar)


# -- short texts ------------------------------------------------------------------------------------------------------


def test_texts_many_short_ones_of_one_request_leave_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    async def main() -> None:
        bench = Bench()
        pool, client = TextWorkers(bench.preparation), bench.client("a")
        for _ in range(3):
            await pool.run(client, lambda: threads.append(threading.current_thread()), size=INLINE_CHARS // 2)
        pool.close()

    run(main())
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False]
