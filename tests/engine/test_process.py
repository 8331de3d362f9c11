"""Processes that die: whoever is left is told within seconds, and nobody is left behind (F-1, F-3, F-4, H-2).

The processes are real, the engine's model is not: see `fake_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from forebay.base.errors import EngineError, ModelError, Unavailable
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.lifecycle.launch import configure, launch
from forebay.engine.lifecycle.spawn import spawn
from forebay.engine.stream import Stream
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from tests.deadlines import HANGS_S, NEVER_S, POLL_S, wait_until
from tests.engine.engine_fakes import reference
from tests.engine.fake_engine import ENTRY, script
from tests.integration.forked import stock

ROOT = Path(__file__).parents[2]


def submit(engine: AsyncEngine, prompt: list[int], num_tokens: int = 200) -> Stream:
    return engine.submit(prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens))


async def collect(stream: Stream) -> list[Update]:
    return [update async for update in stream]


async def started(load: float = 0.0, step: float = 0.0, then: str = "", *, ready: bool = True) -> AsyncEngine:
    engine = await AsyncEngine.connect(launch(script(load, step, then), entry=ENTRY))
    if ready:
        async with asyncio.timeout(HANGS_S):
            await engine.ready()
    return engine


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def alive(pid: int) -> bool:
    """Not even a zombie counts as alive: whoever adopts orphans here may not reap them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _idle(engine: AsyncEngine) -> list[Stream]:
    return []


async def _prefilling(engine: AsyncEngine) -> list[Stream]:
    return [submit(engine, [i] * 50) for i in range(1, 5)]


async def _streaming(engine: AsyncEngine) -> list[Stream]:
    streams = [submit(engine, [i, 1]) for i in range(1, 5)]
    for stream in streams:
        await anext(stream)
    return streams


async def _draining(engine: AsyncEngine) -> list[Stream]:
    streams = await _streaming(engine)
    engine.closing = asyncio.ensure_future(engine.close(NEVER_S))  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    return streams


PHASES = {
    "idle": (0.0, _idle),
    "in a long prefill": (NEVER_S, _prefilling),
    "streaming": (0.1, _streaming),
    "draining": (0.1, _draining),
}


def test_an_engine_started_ahead_serves_what_it_is_told_later() -> None:
    async def scene() -> None:
        spawned = spawn(ENTRY)
        engine = await AsyncEngine.connect(configure(spawned, script()))
        async with asyncio.timeout(HANGS_S):
            await engine.ready()
            updates = await collect(submit(engine, [1, 2], 5))
        assert [token for update in updates for token in update.token_ids] == reference([1, 2], 5)
        await engine.close(0.0)
        spawned.discard()
        assert not alive(spawned.child.pid)

    asyncio.run(scene())


def test_c32_requests_arrive_at_the_engine_while_a_step_computes() -> None:
    """Else those behind a crowd of another tenant arrive many steps later than they were sent."""

    async def scene() -> None:
        engine = await started(step=NEVER_S)
        try:
            submit(engine, [1] * 50)
            for i in range(1, 5):
                submit(engine, [i] * 1_000_000)  # the kernel holds less than one of them
            async with asyncio.timeout(HANGS_S):
                while engine.link._transport.get_write_buffer_size():
                    await asyncio.sleep(POLL_S)
        finally:
            await engine.close(0.0)

    asyncio.run(scene())


def test_end_tokens_sent_while_the_engine_loads_hold_once_it_is_ready() -> None:
    async def run() -> list[int]:
        engine = await started(load=0.3, ready=False)
        engine.add_end_tokens([reference([1, 2], 9)[3]])
        await asyncio.wait_for(engine.ready(), HANGS_S)
        updates = await collect(submit(engine, [1, 2], 9))
        await engine.close(drain_s=0.0)
        return [token for update in updates for token in update.token_ids]

    whole = reference([1, 2], 9)
    assert asyncio.run(run()) == whole[: whole.index(whole[3]) + 1]


def test_an_engine_that_is_not_wanted_after_all_leaves_nothing_behind() -> None:
    stock()  # which has a socket
    fds = num_fds()
    spawned = spawn(ENTRY)
    assert alive(spawned.child.pid)
    spawned.discard()
    assert not alive(spawned.child.pid)
    assert num_fds() == fds
    spawned.discard()


def test_starting_an_engine_needs_no_import_that_takes_time() -> None:
    """It imports torch while its parent imports all this; reading the words takes msgspec and no more."""
    slow = ("torch", "numpy", "asyncio", "rich", "pydantic", "starlette", "tokenizers", "jinja2")
    code = f"import sys, forebay.cli.serve; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.quick(2)
@pytest.mark.parametrize(("step", "reach"), PHASES.values(), ids=PHASES.keys())
def test_a_killed_engine_fails_every_stream_and_leaves_nothing_behind(
    step: float, reach: Callable[[AsyncEngine], Awaitable[list[Stream]]]
) -> None:
    async def scene() -> None:
        engine = await started(step=step)
        streams = await reach(engine)
        os.kill(engine.link.pid, signal.SIGKILL)
        async with asyncio.timeout(HANGS_S):
            ends = [(await collect(stream))[-1] for stream in streams]
            cause = await engine.link.died()
        assert {end.failure.code for end in ends if end.failure} <= {"engine_dead"}
        assert all(end.finish is FinishReason.ERROR for end in ends)
        assert "SIGKILL" in cause.message
        with pytest.raises(Unavailable):
            submit(engine, [1])
        await engine.close(0.0)
        assert not alive(engine.link.pid)

    asyncio.run(scene())
    before = num_fds()
    asyncio.run(scene())
    assert num_fds() == before


def test_an_engine_killed_while_loading_fails_the_start() -> None:
    async def scene() -> None:
        engine = await started(load=NEVER_S, ready=False)
        waiting = asyncio.ensure_future(engine.ready())
        await asyncio.sleep(0)
        os.kill(engine.link.pid, signal.SIGKILL)
        async with asyncio.timeout(HANGS_S):
            with pytest.raises(EngineError, match="SIGKILL"):
                await waiting
        await engine.close(0.0)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("then", "kind", "cause"),
    [("refuse", ModelError, "no such checkpoint: pull it first"), ("crash", EngineError, "SIGABRT")],
)
def test_a_start_that_fails_says_why(then: str, kind: type[EngineError], cause: str) -> None:
    async def scene() -> None:
        engine = await started(then=then, ready=False)
        with pytest.raises(kind, match=cause):
            await engine.ready()
        await engine.close(0.0)

    asyncio.run(scene())


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started_children: list[subprocess.Popen[str]] = []
    yield started_children
    for child in started_children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def serve_elsewhere(children: list[subprocess.Popen[str]], *arguments: object) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "tests.engine.fake_server", *map(str, arguments)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children.append(child)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


SERVERS = {
    "while the engine loads": (NEVER_S, 0, 0, 1),
    "idle": (0, 0, 0, 1),
    "in a long step": (0, NEVER_S, 1, 50),
    "streaming": (0, 0.1, 4, 2, "tokens"),
    "draining": (0, 0.1, 4, 2, "drain"),
    "in a long step, started by a thread": (0, NEVER_S, 1, 50, "thread"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS.keys())
def test_a_killed_parent_takes_its_engine_with_it(
    arguments: tuple[object, ...], children: list[subprocess.Popen[str]]
) -> None:
    parent, engine_pid = serve_elsewhere(children, *arguments)
    if arguments[0] == 0:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
    parent.kill()
    wait_until(lambda: not alive(engine_pid))


def test_an_engine_in_a_long_step_is_heard_and_says_so() -> None:
    """It answers nobody meanwhile; the thread that speaks for it needs no step to end."""

    async def scene() -> None:
        engine = await started(step=3600.0)
        stream = submit(engine, [1, 2])
        async with asyncio.timeout(HANGS_S):
            while engine.link.last_beat is None or engine.link.last_beat.turn_age_s == 0:
                await asyncio.sleep(0.01)
        # No step has shown yet what one takes.
        assert engine.link.last_beat.step_limit_s == script().scheduling.stall_timeout_s
        await engine.close(0.0)
        assert (await collect(stream))[-1].finish is FinishReason.ERROR

    asyncio.run(scene())


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]


def test_signals_that_end_processes_do_not_kill_the_engine_under_its_server() -> None:
    """A terminal sends SIGINT, SIGQUIT and SIGHUP to all of its processes, an operator's `kill` of a group any."""

    async def scene() -> None:
        loading, serving = await started(load=2.0, ready=False), await started(step=0.005)
        stream = submit(serving, [1, 2], 20)
        await anext(stream)
        for engine in (loading, serving):
            for number in ENDING:
                os.kill(engine.link.pid, number)
        assert (await collect(stream))[-1].finish is FinishReason.LENGTH
        await loading.ready()
        await asyncio.gather(loading.close(0.0), serving.close(0.0))

    asyncio.run(scene())


def test_closing_during_a_long_step_or_a_load_does_not_wait_for_it() -> None:
    async def scene() -> None:
        loading, stuck = await started(load=NEVER_S, ready=False), await started(step=NEVER_S)
        stream = submit(stuck, [1, 2])
        async with asyncio.timeout(HANGS_S):
            await asyncio.gather(loading.close(0.0), stuck.close(0.1))
        (end,) = await collect(stream)
        assert end.failure is not None
        assert end.failure.code == "shutting_down"
        assert not alive(loading.link.pid)
        assert not alive(stuck.link.pid)

    asyncio.run(scene())


@pytest.mark.slow
def test_starts_and_ends_leave_no_descriptor_and_no_process() -> None:
    async def cycle(kill: bool) -> int:
        engine = await started(ready=not kill)
        if kill:
            os.kill(engine.link.pid, signal.SIGKILL)
        else:
            (*_, last) = await collect(submit(engine, [1, 2], 3))
            assert last.finish is FinishReason.LENGTH
        await engine.close(0.0)
        return engine.link.pid

    async def cycles(n: int) -> list[int]:
        return list(await asyncio.gather(*(cycle(kill=i % 2 == 0) for i in range(n))))

    asyncio.run(cycles(2))
    before = num_fds()
    pids = [pid for _ in range(3) for pid in asyncio.run(cycles(2))]
    assert num_fds() == before
    assert not any(alive(pid) for pid in pids)


FAULTS = {
    "engine.load=memory": None,
    "engine.launch=memory@3": "out_of_memory",
    "engine.result=runtime@3": "step_failed",
    "engine.add=os@2": "step_failed",
    "engine.plan=runtime@3": "step_failed",
    "engine.commit=memory@3": "out_of_memory",
    "engine.receive=runtime@2": "engine_dead",
    "engine.send=os@2": "engine_dead",
    "engine.launch=kill@3": "engine_dead",
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("point", "code"), FAULTS.items())
def test_a_fault_at_any_point_ends_every_request_typed_and_wedges_nothing(
    point: str, code: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    monkeypatch.setenv("FOREBAY_FAULTS", point)

    async def scene() -> None:
        engine = await started(step=0.005, ready=False)
        if code is None:
            with pytest.raises(EngineError, match="MemoryError"):
                await engine.ready()
            await engine.close(0.0)
            return
        await engine.ready()
        first = submit(engine, [1, 2], 10)
        begun = await anext(first)  # on a busy machine this may be all of it, end included
        # Either the engine lives and serves whoever comes, or it is dead and everybody is told.
        with contextlib.suppress(Unavailable):
            second = submit(engine, [3, 4], 10)
            async with asyncio.timeout(HANGS_S):
                ends = [[begun, *await collect(first)][-1], (await collect(second))[-1]]
            codes = {end.failure.code for end in ends if end.failure}
            # Who fails in company is run again, so it depends on who came when whether anybody ends.
            assert codes <= {code}
            assert codes or not (code == "engine_dead" or point.startswith("engine.add"))
        if code == "engine_dead":
            await asyncio.wait_for(engine.link.died(), HANGS_S)
        else:
            updates = await collect(submit(engine, [5, 6], 10))
            assert [token for update in updates for token in update.token_ids] == reference([5, 6], 10)
        await engine.close(0.0)

    asyncio.run(scene())
    dies_aloud = code == "engine_dead" and "kill" not in point
    assert ("engine_died" in capfd.readouterr().err) is (dies_aloud or code is None)


def test_aborted_requests_give_their_pages_back_before_they_would_have_ended() -> None:
    async def scene() -> None:
        engine = await started(step=0.2)
        streams = [submit(engine, [i] * 60, 100) for i in range(1, 13)]
        await anext(streams[0])
        for stream in streams:
            stream.abort()
        async with asyncio.timeout(HANGS_S):
            for stream in streams:
                assert (await collect(stream))[-1].finish is FinishReason.ABORT
            state = await engine.state()
        assert (state.num_running, state.num_waiting) == (0, 0)
        assert all(pool.running == 0 for pool in state.pools)
        steps = state.counters["engine.steps"]
        assert (await engine.state()).counters["engine.steps"] == steps
        await engine.close(0.0)

    asyncio.run(scene())


def test_the_engine_sees_neither_our_settings_nor_our_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", "canary-key")

    async def scene() -> None:
        engine = await started()
        seen = [Path(f"/proc/{engine.link.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        assert not any(b"canary-key" in text for text in seen)
        await engine.close(0.0)

    asyncio.run(scene())
