"""`AsyncEngine` on the event loop that the server uses, with the test playing the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import uvloop

from forebay.base.loop_clock import LoopClock
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.frames import Updates
from forebay.engine.stream import Stream
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from tests.deadlines import HANGS_S
from tests.engine.engine_fakes import READY, ScriptedEngine

PARAMS = SamplingParams(max_tokens=8)

Scene = Callable[[AsyncEngine, ScriptedEngine], Awaitable[None]]


class FakeTime:
    """The source of a `LoopClock` whose ticks are the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock: LoopClock | None = None

    def __call__(self) -> float:
        return self.now

    def stands_still_for(self, seconds: float) -> None:
        self.now += seconds

    def passes(self, seconds: float) -> None:
        self.now += seconds
        assert self.clock is not None
        self.clock.tick()


def play(scene: Scene, *, ready: bool = True, peer: ScriptedEngine | None = None, time: FakeTime | None = None) -> None:
    scripted = peer or ScriptedEngine()

    async def main() -> None:
        clock = LoopClock(time) if time else LoopClock()
        if time:
            time.clock = clock
        engine = await AsyncEngine.connect(scripted, clock)
        if ready:
            scripted.say(READY)
            await engine.ready()
        try:
            async with asyncio.timeout(HANGS_S):
                await scene(engine, scripted)
        finally:
            await engine.close(0.0)
        assert scripted.stopped

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    scripted.die()


def submit(engine: AsyncEngine, prompt: list[int] | None = None) -> Stream:
    return engine.submit(prompt_token_ids=prompt or [1, 2, 3], params=PARAMS)


def tokens(request_id: int, *ids: int, finish: FinishReason | None = None) -> Updates:
    return Updates(updates=[Update(request_id=request_id, token_ids=list(ids), finish=finish)])


async def collect(stream: Stream) -> list[Update]:
    return [update async for update in stream]
