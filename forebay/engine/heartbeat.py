"""The engine's sign of life: it needs no step to end, and stops with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from forebay.base.clock import TICK_S, RunClock
from forebay.engine.channel import Channel, ChannelClosed
from forebay.engine.frames import Beat, ToEngine

BEAT_INTERVAL_S: Final = TICK_S


def start_beating(clock: RunClock, channel: Channel[ToEngine], beat: Callable[[], Beat]) -> None:
    """From a thread of its own until the channel is closed: `clock` is ticked and a `Beat` sent about every second.
    Native calls leave the interpreter's lock while they run, so not even the longest step is in its way."""

    def run() -> None:
        while True:
            time.sleep(BEAT_INTERVAL_S)
            clock.tick()
            try:
                # A peer that is not reading is no reason to pile them up.
                if not channel.num_unsent_bytes:
                    channel.send(beat())
            except ChannelClosed:
                return

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
