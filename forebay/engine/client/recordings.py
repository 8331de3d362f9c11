"""The files of a flight recorder, which the process beside the engine writes, also when the engine is dead."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.errors import Conflict, EngineError
from forebay.base.log import event, get_logger
from forebay.base.paths import history_folder
from forebay.base.record_buffer import RecordBuffer
from forebay.engine.recorder.file import Header, write

MOST_FILES: Final = 16  # that one process writes of its own accord: a step may fail each second
LEAST_BETWEEN_S: Final = 60.0  # of these, but for the last one of an engine
FAULTS: Final = {
    "failed_steps": "a step failed",
    "recoveries": "the scheduler failed",
    "ledger_violations": "the ledger found a violation",
}  # by the counter that grows

log = get_logger("recorder")


class Recordings:
    """Writes the files of one engine. `describe` returns what is known of its model. Belongs to one event loop."""

    def __init__(
        self,
        buffer: RecordBuffer | None,
        describe: Callable[[], Mapping[str, str]],
        *,
        has_tokens: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer, self._describe, self._has_tokens, self._clock = buffer, describe, has_tokens, clock
        self.folder = history_folder() / "flights"
        self._numbers = itertools.count(1)
        self._num_own, self._last_at = 0, float("-inf")
        self._counted: dict[str, float] = {}
        self._pending: set[asyncio.Task[None]] = set()

    @property
    def enabled(self) -> bool:
        """Whether there is a recorder."""
        return self._buffer is not None

    def note(self, counters: Mapping[str, float]) -> None:
        """Write a file if one of `FAULTS` was counted since the last call."""
        for name, reason in FAULTS.items():
            count = counters.get(name, 0.0)
            if count > self._counted.get(name, 0.0):
                self.begin(reason)
            self._counted[name] = count

    def begin(self, reason: str, *, last: bool = False) -> None:
        """Begin to write a file, and log its path; nothing if the last one was written a moment ago, or without a
        recorder. The `last` one of an engine is written at any time."""
        now = self._clock()
        is_due = now - self._last_at >= LEAST_BETWEEN_S and self._num_own < MOST_FILES
        if self._buffer is None or not (is_due or last):
            return
        self._last_at, self._num_own = now, self._num_own + 1
        task = asyncio.get_running_loop().create_task(self._logged(reason))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def write(self, reason: str) -> Path:
        """Write a file and return its path. Raises Conflict without a recorder, or before the scheduler is made, and
        EngineError if it cannot be written."""
        if self._buffer is None:
            raise Conflict("there is no flight recorder: start with --flight-recorder 16MiB", code="no_flight_recorder")
        try:
            path = await asyncio.to_thread(self._write, self._buffer, reason)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise EngineError(f"the flight recorder could not be written: {error}", code="disk") from error
        log.warning(event("flight_recorder_written", reason=reason, path=path, replay="forebay replay PATH"))
        return path

    async def settle(self) -> None:
        """Wait until all that was begun is written."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _logged(self, reason: str) -> None:
        try:
            await self.write(reason)
        except (Conflict, EngineError) as error:
            log.error(event("flight_recorder_failed", reason=error.message))

    def _write(self, buffer: RecordBuffer, reason: str) -> Path:
        content, now = buffer.content(), time.time()
        if not content.first:
            raise Conflict("nothing is recorded yet: the engine still starts", code="nothing_recorded")
        name = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        path = self.folder / f"flight-{name}-{os.getpid()}-{next(self._numbers)}.bin"
        header = Header(
            model=dict(self._describe()),
            reason=reason,
            time_s=now,
            has_tokens=self._has_tokens,
            num_lost_bytes=content.num_lost_bytes,
        )
        write(path, header, content)
        return path
