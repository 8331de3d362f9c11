"""When an engine that says nothing, or nothing good, is given up."""

from __future__ import annotations

import asyncio

import pytest

from forebay.base.clock import MOST_S
from forebay.engine.client.async_engine import AsyncEngine
from forebay.requests.updates import FinishReason
from tests.engine.engine_fakes import CONFIG, ScriptedEngine, beat
from tests.engine.scenes import FakeTime, collect, play, submit, tokens


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The time by which engines are watched, all the time."""
    monkeypatch.setattr("forebay.engine.client.link.WATCH_INTERVAL_S", 0.0)
    return FakeTime()


async def some_turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0.001)


def test_an_engine_is_not_asked_for_a_sign_of_life(watched: FakeTime) -> None:
    """It gives them by itself: what it is told is what somebody wants."""

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        for _ in range(int(CONFIG.scheduling.stall_timeout_s) - 1):
            watched.passes(1.0)
        await some_turns()
        assert peer.channel.receive(0) == []
        assert engine.link.last_tick_age_s == pytest.approx(CONFIG.scheduling.stall_timeout_s - 1)
        peer.say(beat())
        while engine.link.last_beat is None:
            await asyncio.sleep(0)
        assert engine.link.last_tick_age_s == 0

    play(scene, time=watched)


def test_an_engine_that_is_silent_for_too_long_is_given_up(watched: FakeTime) -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        for _ in range(int(CONFIG.scheduling.stall_timeout_s) + 1):
            watched.passes(1.0)
        assert (await collect(stream))[-1].finish is FinishReason.ERROR
        assert (await engine.link.died()).code == "engine_stalled"

    play(scene, time=watched)


def test_an_engine_whose_thread_speaks_while_its_loop_hangs_is_given_up_as_well(watched: FakeTime) -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        peer.say(beat(turn_age_s=CONFIG.scheduling.stall_timeout_s - 1))
        await some_turns()
        assert engine.link.dead is None
        peer.say(beat(turn_age_s=CONFIG.scheduling.stall_timeout_s + 1))
        assert (await collect(stream))[-1].finish is FinishReason.ERROR
        assert "at one step for 61.0 s" in (await engine.link.died()).message

    play(scene, time=watched)


def test_time_in_which_nobody_ran_is_no_silence(watched: FakeTime) -> None:
    """The whole tree was stopped for an hour, and the server is the first to go on."""

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        watched.stands_still_for(3600.0)
        await some_turns()
        assert engine.link.dead is None
        assert engine.link.last_tick_age_s <= MOST_S
        peer.say(tokens(stream.request_id, 1, finish=FinishReason.STOP))
        assert (await collect(stream))[-1].finish is FinishReason.STOP

    play(scene, time=watched)
