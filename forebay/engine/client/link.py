"""The connection to one engine process: its frames, its health, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self, cast

from forebay.base.errors import EngineError, Unavailable
from forebay.base.log import event, get_logger
from forebay.base.loop_clock import LoopClock
from forebay.engine.channel import MAX_FRAME_BYTES, ChannelError, FrameDecoder
from forebay.engine.client.mailboxes import Mailboxes
from forebay.engine.client.questions import Question, Questions
from forebay.engine.client.recordings import Recordings
from forebay.engine.frames import (
    WEIGHTS,
    AbortRequest,
    Beat,
    Dead,
    FromEngine,
    Ready,
    ReuseReport,
    Shutdown,
    State,
    ToEngine,
    TreePart,
    Updates,
)
from forebay.engine.lifecycle.launch import EngineProcess, describe_exit
from forebay.requests.updates import Failure

WATCH_INTERVAL_S: Final = 1.0
EXIT_GRACE_S: Final = 2.0

log = get_logger("engine.client")


class EngineLink:
    """The connection to one engine process, which belongs to the event loop that it was made in: its frames, its
    health and its end. `mailboxes` are the streams of its requests."""

    def __init__(self, process: EngineProcess, clock: LoopClock) -> None:
        self.dead: Failure | None = None  # the root cause, once the engine has died or was closed
        self.last_state: State | None = None  # as of its last report, about a second old while it works
        self.last_beat: Beat | None = None
        # When the engine has given its weights back, and while it takes them again: of what is needed here with them.
        self.on_sleep: Callable[[], None] = lambda: None
        self.on_wake: Callable[[], None] = lambda: None
        self.on_cache_events: Callable[[bytes], None] = lambda batch: None  # encoded for routers
        self.process = process
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._died: asyncio.Event = asyncio.Event()
        self._lost: asyncio.Event = asyncio.Event()  # the socket is closed
        self.mailboxes = Mailboxes(self.abort)
        self._questions = Questions(self.send)
        recorder = process.config.recorder
        self.recordings = Recordings(process.records, partial(_model, self._ready), has_tokens=recorder.record_tokens)
        self._closing = False
        self._clock = clock
        self._heard_at = self._clock()
        self._transport: asyncio.Transport
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, process: EngineProcess, clock: LoopClock | None = None) -> Self:
        """Take over the channel of a launched engine, which may still be loading. Owns `process` from here on."""
        engine = cls(process, clock or LoopClock())
        transport, _ = await engine._loop.create_unix_connection(lambda: _Protocol(engine), sock=process.sock)
        engine._transport = transport
        transport.set_write_buffer_limits(high=MAX_FRAME_BYTES)
        engine._watch()
        return engine

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def info(self) -> Ready:
        """The engine's description of itself when it was ready; raises Unavailable (code `starting`) before."""
        if self._ready.done() and self._ready.exception() is None:
            return self._ready.result()
        raise self.unavailable()

    @property
    def is_ready(self) -> bool:
        """Whether `submit` would be served: up, alive and not draining."""
        return self.dead is None and not self._closing and self._ready.done()

    @property
    def _has_released_weights(self) -> bool:
        return self.last_state is not None and WEIGHTS in self.last_state.memory.released

    @property
    def num_requests(self) -> int:
        """Requests submitted and not ended."""
        return len(self.mailboxes)

    @property
    def last_tick_age_s(self) -> float:
        """Seconds since the engine was last heard of. A thread of its own speaks every second once it is ready, so this
        grows past that only when the process does not run. Time in which we did not run ourselves is no silence."""
        return self._clock() - self._heard_at

    async def ready(self) -> Ready:
        """Wait until the engine is up. Raises its typed error if it dies before."""
        return await asyncio.shield(self._ready)

    async def died(self) -> Failure:
        """Wait for the engine's death; the failure is its root cause, for the log and the exit message."""
        await self._died.wait()
        return cast(Failure, self.dead)

    def abort(self, request_id: int) -> None:
        """Ask the engine to end a request that has not ended."""
        if self.dead is None and request_id in self.mailboxes:
            self.send(AbortRequest(request_id=request_id))

    def send(self, frame: ToEngine) -> None:
        """Send a frame; nothing once the socket is closed. Raises FrameTooLarge."""
        data = self.process.encoder.encode(frame)
        if not self._lost.is_set():  # else the streams are about to end
            self._transport.write(data)

    @property
    def is_full(self) -> bool:
        """Whether the engine has yet to read so many bytes that no request should be added."""
        return self._transport.get_write_buffer_size() > MAX_FRAME_BYTES

    async def ask(self, question: type[Question], **what: Any) -> State:
        """Return the state that answers a question. Raises the error of a question that the engine refused."""
        state: State = await self.answer_to(question, **what)
        if state.refused is not None:
            raise state.refused.error
        return state

    async def answer_to(self, question: type[Question], **what: Any) -> Any:
        """Return the frame that answers a question. Raises Unavailable without a ready engine."""
        if self.dead is not None or not self._ready.done():
            raise self.unavailable()
        return await self._questions.ask(question, **what)

    def _watch(self) -> None:
        """An engine that hangs for as long as no request may go without a token will not enforce that limit itself."""
        if self.dead is not None:
            return
        hang = self._hang()
        if hang is None:
            self._loop.call_later(WATCH_INTERVAL_S, self._watch)
        else:
            self._died_of(Failure.of(EngineError(hang, code="engine_stalled")))
            self._transport.abort()

    def _hang(self) -> str | None:
        limit = self.process.config.scheduling.stall_timeout_s
        turn_age_s = self.last_beat.turn_age_s if self.last_beat else 0.0
        if self._ready.done() and self.last_tick_age_s > limit:
            return (
                f"the engine was last heard of {self.last_tick_age_s:.1f} s ago and the limit is {limit:g} s "
                "(--stall-timeout)"
            )
        if turn_age_s > limit:
            return f"the engine has been at one step for {turn_age_s:.1f} s; the limit is {limit:g} s (--stall-timeout)"
        return None

    def unavailable(self) -> Unavailable:
        """Return the error of a request that is not taken: why the engine does not serve."""
        if self.dead is not None:
            return Unavailable("the engine is not running any more", code="engine_dead")
        if self._closing:
            return Unavailable("the server is shutting down", code="draining")
        return Unavailable("the model is still loading: try again in a few seconds", code="starting")

    def _on_data(self, data: bytes) -> None:
        self._heard_at = self._clock()
        for frame in self._decoder.feed(data):
            match frame:
                case Updates():
                    self.mailboxes.deliver(frame)
                    if frame.cache_events:
                        self.on_cache_events(frame.cache_events)
                case State():
                    self._note(frame)
                    self._questions.answer(frame)
                case TreePart() | ReuseReport():
                    self._questions.answer(frame)
                case Beat():
                    self.last_beat = frame
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(frame)
                case Dead():
                    self._died_of(frame.failure)

    def _note(self, state: State) -> None:
        """Keep the latest state, and call `on_sleep` once the weights are released."""
        had_released, self.last_state = self._has_released_weights, state
        self.recordings.note(state.counters)
        if self._has_released_weights and not had_released:
            self.on_sleep()

    def _on_eof(self) -> None:
        """The kernel closes a dead process's socket just before it can be reaped, hence a task that waits for it."""
        self._lost.set()
        if self._loop.is_running():  # else the loop is being closed over our head, and takes no tasks any more
            self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        if self.dead is not None:
            return
        code = await asyncio.to_thread(self.process.stop, EXIT_GRACE_S)
        self._died_of(Failure.of(EngineError(f"the engine process {describe_exit(code)}", code="engine_dead")))

    def _died_of(self, failure: Failure) -> None:
        if self.dead is None:
            log.error(event("engine_dead", cause=failure.message))
            if self._loop.is_running():
                self.recordings.begin(f"the engine died: {failure.message}", last=True)
            self._end(failure, Unavailable("the engine died while it worked on this request", code="engine_dead"))

    def _end(self, failure: Failure, reason: Unavailable) -> None:
        """End every stream and answer every question: no frame will come any more."""
        self.dead = failure
        self.mailboxes.fail(reason)
        self._questions.fail(self.unavailable)
        if not self._ready.done():
            self._ready.set_exception(failure.error)
            self._ready.exception()  # nobody may be waiting for it
        self._died.set()

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give the running ones `drain_s`, fail the rest (`shutting_down`), end and reap the
        engine. Idempotent; returns within `drain_s` and about two seconds. One that still loads is killed: there is
        nothing to lose."""
        grace_s = EXIT_GRACE_S if self._ready.done() else 0.0
        self._closing = True
        if self.mailboxes and self.dead is None:
            await self.mailboxes.drain(drain_s)
        if self.dead is None:
            self.send(Shutdown())
            reason = "the server is shutting down and the request did not end in the time it had left"
            over = Failure.of(Unavailable("the engine was closed", code="shutting_down"))
            self._end(over, Unavailable(reason, code="shutting_down"))
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), grace_s)
        self._transport.abort()
        await asyncio.to_thread(self.process.stop, grace_s)
        await self.recordings.settle()


def _model(ready: asyncio.Future[Ready]) -> dict[str, str]:
    """Describe the model of an engine in files of its flight recorder."""
    return {"model_type": ready.result().model_type} if ready.done() and ready.exception() is None else {}


class _Protocol(asyncio.Protocol):
    """The asyncio end of the channel; bytes that are not a frame count as the engine's death."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine

    def data_received(self, data: bytes) -> None:
        try:
            self._engine._on_data(data)
        except ChannelError as error:
            self._engine._died_of(Failure.of(EngineError(error.message, code=error.code)))
            self._engine._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._on_eof()
