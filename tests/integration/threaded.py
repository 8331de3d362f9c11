"""An engine core turned by a thread of this process, behind the real channel."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import msgspec

from forebay.base.clock import RunClock
from forebay.engine.channel import Channel, FrameEncoder
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.frames import ToEngine
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.loop import EngineLoop
from tests.deadlines import HANGS_S
from tests.engine.engine_fakes import CONFIG, READY


class ThreadedEngine:
    """What `AsyncEngine` takes for its process: what is asked of either side can be looked at from here."""

    def __init__(self, core: EngineCore, **told: Any) -> None:
        """`told` are the fields of `Ready` that differ from `engine_fakes.READY`."""
        self.core, self.pid = core, os.getpid()
        self.ready = msgspec.structs.replace(READY, **{"max_requests": 264, **told})
        self.config = CONFIG
        self.records = None  # no memory of a flight recorder
        self.encoder = FrameEncoder()
        self.sock, theirs = socket.socketpair()
        self.channel: Channel[ToEngine] = Channel(theirs, ToEngine)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    async def connect(self) -> AsyncEngine:
        engine = await AsyncEngine.connect(self)  # type: ignore[arg-type]
        await engine.ready()
        return engine

    def stop(self, grace_s: float) -> int:
        self.sock.close()
        self._thread.join(HANGS_S)
        return 1 if self.failure or self._thread.is_alive() else 0

    def _run(self) -> None:
        clock = RunClock()
        loop = EngineLoop(self.core, self.channel, clock=clock)
        self.channel.send(self.ready)
        loop.start_beating(clock)
        try:
            loop.run()
        except BaseException as error:
            self.failure = error
        self.channel.close()
