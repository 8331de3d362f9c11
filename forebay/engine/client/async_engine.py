"""The engine as an asyncio program sees it: submit requests, iterate their updates, watch its health."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from forebay.base.errors import Conflict, EngineError, Overloaded, PayloadTooLarge, Unavailable, from_code
from forebay.base.log import event, get_logger
from forebay.base.loop_clock import LoopClock
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.channel import MAX_FRAME_BYTES, ChannelError, FrameDecoder, FrameTooLarge
from forebay.engine.client.texts import TextEngine
from forebay.engine.frames import (
    TAGS,
    WEIGHTS,
    AbortRequest,
    AddRequest,
    Beat,
    Checked,
    CheckTransfers,
    Dead,
    FlushCache,
    FromEngine,
    GetState,
    GetTree,
    Ready,
    Release,
    Resume,
    Shutdown,
    State,
    ToEngine,
    TreePart,
    Updates,
    UpdateWeights,
)
from forebay.engine.lifecycle.launch import EngineProcess, describe_exit
from forebay.engine.stream import Mailbox, Stream, failed
from forebay.memory.radix_node import OPERATOR
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import Failure
from forebay.scheduler.limits import Room

WATCH_INTERVAL_S: Final = 1.0
EXIT_GRACE_S: Final = 2.0

Question = GetState | GetTree | FlushCache | Release | Resume | UpdateWeights | CheckTransfers

log = get_logger("engine.client")


class AsyncEngine(TextEngine):
    """The client of one engine process; belongs to the event loop that it was made in.

        process = launch(config)                  # at once: the engine loads while we do other things
        engine = await AsyncEngine.connect(process)
        await engine.ready()                      # Ready, or the typed reason why not
        async with engine.submit(prompt_token_ids=[1, 2], params=SamplingParams()) as stream:
            async for update in stream: ...
        await engine.close(drain_s=30)

    As a library, `async with AsyncEngine.start(model=...) as engine` does the first and the last lines, and `generate`
    and `chat` take and tell texts.
    """

    def __init__(self, process: EngineProcess, clock: LoopClock) -> None:
        self.dead: Failure | None = None  # the root cause, once the engine has died or was closed
        self.last_state: State | None = None  # as of its last report, about a second old while it works
        self.last_beat: Beat | None = None
        # When the engine has given its weights back, and while it takes them again: of what is needed here with them.
        self.on_rest: Callable[[], None] = lambda: None
        self.on_wake: Callable[[], None] = lambda: None
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._died: asyncio.Event = asyncio.Event()
        self._drained: asyncio.Event = asyncio.Event()
        self._lost: asyncio.Event = asyncio.Event()  # the socket is closed
        self._mailboxes: dict[int, Mailbox] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._serials = itertools.count(1)
        self._closing = False
        self._clock = clock
        self._heard_at = self._clock()
        self._transport: asyncio.Transport
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, process: EngineProcess, clock: LoopClock | None = None) -> AsyncEngine:
        """Take over the channel of a launched engine, which may still be loading. Owns `process` from here on."""
        engine = cls(process, clock or LoopClock())
        transport, _ = await engine._loop.create_unix_connection(lambda: _Protocol(engine), sock=process.sock)
        engine._transport = transport
        transport.set_write_buffer_limits(high=MAX_FRAME_BYTES)
        engine._watch()
        return engine

    @property
    def info(self) -> Ready:
        """The engine's description of itself when it was ready; raises Unavailable (code `starting`) before."""
        if self._ready.done() and self._ready.exception() is None:
            return self._ready.result()
        raise self._unavailable()

    @property
    def is_ready(self) -> bool:
        """Whether `submit` would be served: up, alive and not draining."""
        return self.dead is None and not self._closing and self._ready.done()

    @property
    def _rests(self) -> bool:
        return self.last_state is not None and WEIGHTS in self.last_state.memory.released

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_requests(self) -> int:
        """Requests submitted and not ended."""
        return len(self._mailboxes)

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

    def submit(
        self,
        *,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        namespace: str = "",
        author: str = OPERATOR,
        tenant: str = "",
        resume_points: Sequence[int] = (),
        rendezvous: Rendezvous | None = None,
    ) -> Stream:
        """Send a request, with the fields of `AddRequest`; never waits. What the scheduler refuses comes as the
        stream's one update.

        Raises Unavailable (`starting`, `draining`, `engine_dead`), Overloaded when as many requests as it can run and
        queue are in the engine, PayloadTooLarge when the prompt does not fit in a frame.
        """
        if not self.is_ready:
            raise self._unavailable()
        if self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            raise Overloaded("the engine has yet to read the requests before this one: try again later")
        if len(self._mailboxes) >= self.info.max_requests:
            tenants = (mailbox.tenant for mailbox in self._mailboxes.values())
            Room(self._process.config.scheduling.tenants, tenants).check(tenant, self.info.max_requests)
        request_id = next(self._ids)
        frame = AddRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=priority,
            namespace=namespace,
            author=author,
            tenant=tenant,
            resume_points=list(resume_points),
            rendezvous=rendezvous,
        )
        try:
            self._send(frame)
        except FrameTooLarge as error:
            raise PayloadTooLarge(f"the prompt has {len(prompt_token_ids)} tokens: {error.message}") from error
        mailbox = self._mailboxes[request_id] = Mailbox(request_id, tenant)
        return Stream(mailbox, self._abort)

    async def state(self) -> State:
        """The engine's state, answered between two steps. Raises Unavailable when it is starting or dead."""
        return await self._ask(GetState)

    async def tree(self, *, begin: bool) -> TreePart:
        """The next part of what is cached, or the first, answered between two steps. Raises what `state` does."""
        return cast(TreePart, await self._answer_to(GetTree, begin=begin))

    async def flush_cache(self) -> State:
        """Drop every cached prefix that no request holds; the state is as of after that."""
        return await self._ask(FlushCache)

    async def release(self, tags: Sequence[str], *, mode: str = "wait", timeout_s: float = 300.0) -> State:
        """Give the memory of these tags back, () to pause only; as the frame `Release` says. Raises what is wrong."""
        return await self._ask(Release, tags=list(tags), mode=mode, timeout_s=timeout_s)

    async def resume(self, tags: Sequence[str]) -> State:
        """Take the memory of these tags again, () to go on after a pause. Raises what is wrong: it sleeps as before."""
        if WEIGHTS in tags:
            self._loop.call_soon(self.on_wake)  # once it has been asked
        return await self._ask(Resume, tags=list(tags))

    async def sleep(self, tags: Sequence[str] = TAGS) -> State:
        """Give memory back when all that runs has ended."""
        return await self.release(tags)

    async def wake_up(self, tags: Sequence[str] = ()) -> State:
        """Take memory again; () for all that was given back."""
        return await self.resume(tags or (await self.state()).memory.released)

    async def update_weights(self, path: str, *, mode: str = "wait", timeout_s: float = 300.0) -> State:
        """Take the weights of the checkpoint at `path`, on the engine's machine. Raises what is wrong."""
        return await self._ask(UpdateWeights, path=path, mode=mode, timeout_s=timeout_s)

    async def check_transfers(self, host: str, port: int) -> Checked:
        """Fetch a test pattern from the prefill server that listens there; for decode engines. Raises what is wrong."""
        mode = self._process.config.disaggregation.mode
        if mode is not DisaggregationMode.DECODE:
            raise Conflict(f"the server's --disaggregation-mode is {mode}: ask a decode server", code="not_decode")
        checked = (await self._ask(CheckTransfers, host=host, port=port)).checked
        return cast(Checked, checked)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give the running ones `drain_s`, fail the rest (`shutting_down`), end and reap the
        engine. Idempotent; returns within `drain_s` and about two seconds. One that still loads is killed: there is
        nothing to lose."""
        grace_s = EXIT_GRACE_S if self._ready.done() else 0.0
        self._closing = True
        if self._mailboxes and self.dead is None:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_s)
        if self.dead is None:
            self._send(Shutdown())
            reason = "the server is shutting down and the request did not end in the time it had left"
            over = Failure.of(Unavailable("the engine was closed", code="shutting_down"))
            self._end(over, Unavailable(reason, code="shutting_down"))
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), grace_s)
        self._transport.abort()
        await asyncio.to_thread(self._process.stop, grace_s)

    def _abort(self, request_id: int) -> None:
        if self.dead is None and request_id in self._mailboxes:
            self._send(AbortRequest(request_id=request_id))

    def _send(self, frame: ToEngine) -> None:
        data = self._process.encoder.encode(frame)
        if not self._lost.is_set():  # else the streams are about to be told
            self._transport.write(data)

    async def _ask(self, question: type[Question], **what: Any) -> State:
        state: State = await self._answer_to(question, **what)
        if state.refused is not None:
            raise from_code(state.refused.kind, state.refused.message, state.refused.code)
        return state

    async def _answer_to(self, question: type[Question], **what: Any) -> Any:
        if self.dead is not None or not self._ready.done():
            raise self._unavailable()
        serial = next(self._serials)
        self._answers[serial] = self._loop.create_future()
        try:
            self._send(question(serial=serial, **what))
            return await self._answers[serial]
        finally:
            del self._answers[serial]

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
        limit = self._process.config.scheduling.stall_timeout_s
        turn_age_s = self.last_beat.turn_age_s if self.last_beat else 0.0
        if self._ready.done() and self.last_tick_age_s > limit:
            return (
                f"the engine was last heard of {self.last_tick_age_s:.1f} s ago and the limit is {limit:g} s "
                "(--stall-timeout)"
            )
        if turn_age_s > limit:
            return f"the engine has been at one step for {turn_age_s:.1f} s; the limit is {limit:g} s (--stall-timeout)"
        return None

    def _unavailable(self) -> Unavailable:
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
                    self._deliver(frame)
                case State() | TreePart():
                    if isinstance(frame, State):
                        rested, self.last_state = self._rests, frame
                        if self._rests and not rested:
                            self.on_rest()
                    answer = self._answers.get(frame.answers)
                    if answer is not None and not answer.done():
                        answer.set_result(frame)
                case Beat():
                    self.last_beat = frame
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(frame)
                case Dead():
                    self._died_of(frame.failure)

    def _deliver(self, frame: Updates) -> None:
        mailboxes = self._mailboxes
        for request_id, token_ids in frame.tokens():
            mailbox = mailboxes.get(request_id)
            # None: cut before, its abort is on the way.
            if mailbox is not None and not mailbox.put_tokens(token_ids):
                self._cut(request_id)
        for update in frame.updates:
            mailbox = mailboxes.get(update.request_id)
            if mailbox is None:
                continue
            if not mailbox.put(update):
                self._cut(update.request_id)
            elif mailbox.closed:
                del mailboxes[update.request_id]
        if not mailboxes:
            self._drained.set()

    def _cut(self, request_id: int) -> None:
        """Abort a request whose mailbox was full, which has ended the stream."""
        log.warning(event("slow_consumer_cut", id=request_id))
        self._abort(request_id)
        del self._mailboxes[request_id]

    def _on_eof(self) -> None:
        """The kernel closes a dead process's socket just before it can be reaped, hence a task that waits for it."""
        self._lost.set()
        if self._loop.is_running():  # else the loop is being closed over our head, and takes no tasks any more
            self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        if self.dead is not None:
            return
        code = await asyncio.to_thread(self._process.stop, EXIT_GRACE_S)
        self._died_of(Failure.of(EngineError(f"the engine process {describe_exit(code)}", code="engine_dead")))

    def _died_of(self, failure: Failure) -> None:
        if self.dead is None:
            log.error(event("engine_dead", cause=failure.message))
            self._end(failure, Unavailable("the engine died while it worked on this request", code="engine_dead"))

    def _end(self, failure: Failure, reason: Unavailable) -> None:
        """Nothing will come any more: end every stream, answer every question."""
        self.dead = failure
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(failed(request_id, reason))
        self._mailboxes.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._unavailable())
        if not self._ready.done():
            self._ready.set_exception(from_code(failure.kind, failure.message, failure.code))
            self._ready.exception()  # nobody may be waiting for it
        self._drained.set()
        self._died.set()


class _Protocol(asyncio.Protocol):
    """The asyncio end of the channel; what is not a frame counts as the engine's death."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def data_received(self, data: bytes) -> None:
        try:
            self._engine._on_data(data)
        except ChannelError as error:
            self._engine._died_of(Failure.of(EngineError(error.message, code=error.code)))
            self._engine._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._on_eof()
