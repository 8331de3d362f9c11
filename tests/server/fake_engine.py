"""A scripted engine behind the server: deterministic tokens, no model, no process."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forebay.base.errors import Conflict, NotFound, Unavailable
from forebay.base.room import Room
from forebay.engine.client.recordings import Recordings
from forebay.engine.frames import Beat, Checked, LoadedAdapter, Occupied, Ready, ReuseReport, State, TreePart, Updates
from forebay.engine.stream import Receiver
from forebay.memory.radix_node import OPERATOR, Branch
from forebay.memory.retention import RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import PoolingKind, SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import (
    CacheReport,
    Failure,
    FinishReason,
    History,
    MemoryReport,
    MissReason,
    SpeculationReport,
    Update,
)
from forebay.scheduler.state import PoolState

HIDDEN_SIZE = 8
Script = Callable[[list[int], SamplingParams], list[int]]


def count_up(prompt: list[int], params: SamplingParams) -> list[int]:
    """Tokens that depend on the prompt and the seed; never a control token."""
    start = (sum(prompt) * 31 + params.seed) % 40_000
    return [100 + (start + 7 * i) % 40_000 for i in range(params.max_tokens)]


class FakeStream:
    def __init__(self, engine: FakeEngine, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.tokens = deque(engine.script(prompt, params))
        self.sent = 0
        self.tenant = ""
        self.aborted = False
        self.ended = False
        self._engine = engine
        self._updates: deque[Update] = deque()
        self._receiver: Receiver | None = None

    def deliver(self, receiver: Receiver) -> None:
        self._receiver = receiver
        while self._updates:
            receiver.update(self._updates.popleft())

    def abort(self) -> None:
        if not self.ended:
            self.aborted = True
            self._engine.aborted.append(self.request_id)
            self.end(FinishReason.ABORT)

    def end(self, finish: FinishReason, failure: Failure | None = None) -> None:
        self.put(Update(request_id=self.request_id, token_ids=[], finish=finish, failure=failure))

    def put(self, update: Update) -> None:
        if self.ended:
            return
        if update.finish is not None:
            self.ended = True
            self._engine.running.pop(self.request_id, None)
        if self._receiver is None:
            self._updates.append(update)
        elif Updates.pack([update]).token_ids:
            self._receiver.tokens(update.token_ids)
        else:
            self._receiver.update(update)

    def step(self) -> None:
        """A token, or several behind the first where the engine is wide, as the engine would send them."""
        if self.params.pooling:
            self._pool()
            return
        first = self.sent == 0
        token_ids, stops = [], False
        for _ in range(1 if first else self._engine.next_width()):
            token = self.tokens.popleft() if self.tokens else 2
            token_ids.append(token)
            stops = token in self.params.stop_token_ids or (token == 2 and not self.params.ignore_eos)
            if stops or self.sent + len(token_ids) == self.params.max_tokens:
                break
        self.sent += len(token_ids)
        full = self.sent >= self.params.max_tokens
        self.put(
            Update(
                request_id=self.request_id,
                token_ids=token_ids,
                finish=FinishReason.STOP if stops else FinishReason.LENGTH if full else None,
                cache=self._engine.cache if first else None,
                logprobs=[self._score(token) for token in token_ids] if self.params.logprobs >= 0 else None,
                prompt_logprobs=self._prompt_scores() if first and self.params.prompt_logprobs >= 0 else None,
                matched_stop=token_ids[-1] if stops else None,
                speculation=self._engine.speculation if stops or full else None,
                memory=self._engine.memory if stops or full else None,
                history=self._engine.history if stops or full else None,
            )
        )

    def _pool(self) -> None:
        """Labels are scored by the prompt's last id, and of each token by its own; a token's vector is its id."""
        pooling = self.params.pooling
        assert pooling is not None, "the request wants a vector"
        all_tokens = pooling.kind is PoolingKind.ALL
        if pooling.head:
            ids = self.prompt if all_tokens else self.prompt[-1:]
            numbers = [each for token in ids for each in (0.1 * (token % 7), 0.3, -0.2)[: self._engine.num_labels]]
        elif all_tokens:
            numbers = [float(token) for token in self.prompt for _ in range(HIDDEN_SIZE)]
        elif pooling.token_ids:
            numbers = [-0.1 * (1 + sum(self.prompt) % 7), -0.9]
        else:
            numbers = [*self.prompt[:8], *[1.0] * 8][:HIDDEN_SIZE]
        vector = np.array(numbers, dtype="<f4").tobytes()
        self.put(Update(self.request_id, [], finish=FinishReason.STOP, cache=self._engine.cache, vector=vector))

    def _score(self, token: int) -> TokenLogprob:
        others = [token, *(100 + i for i in range(self.params.logprobs))][: max(0, self.params.logprobs)]
        return TokenLogprob(token, -0.5, 1, others, [-0.5 - i for i in range(len(others))])

    def _prompt_scores(self) -> list[TokenLogprob | None]:
        return [None, *(self._score(token) for token in self.prompt[1:])]


class FakeEngine:
    """Steps all running requests every `interval_s` (0: as fast as the loop turns); `manual` leaves stepping to the
    test. Beyond `max_running + max_queued` requests it refuses like the real one. A step brings a request up to `width`
    tokens, behind its first."""

    def __init__(
        self,
        script: Script = count_up,
        *,
        interval_s: float = 0.0,
        max_running: int = 64,
        max_queued: int = 256,
        manual: bool = False,
        context_length: int = 8192,
        vocab_size: int = 49152,
        wants_resume_points: bool = False,
        width: int = 1,
        num_labels: int = 0,
    ) -> None:
        self.script, self.num_labels = script, num_labels
        self._widths = itertools.cycle(range(width, 0, -1))
        self.dead: Failure | None = None
        self.last_state: State | None = None
        self.occupied = Occupied()
        self.last_beat: Beat | None = None
        self.last_tick_age_s = 0.0
        self.is_ready = True
        self.link = self
        self.recordings = Recordings(None, dict, has_tokens=False)
        self.running: dict[int, FakeStream] = {}
        self.submitted: list[FakeStream] = []
        self.namespaces: list[str] = []
        self.authors: list[str] = []
        self.resume_points: list[list[int]] = []
        self.retentions: list[list[RetentionRequest]] = []  # of requests that have some
        self.rendezvous: list[Rendezvous | None] = []
        self.pictures: list[tuple[Picture, ...]] = []
        self.counters = {"steps_total": 1.0}
        self.hybrid_pools: list[PoolState] = []
        self.cache = CacheReport(1, MissReason.NOT_CACHED)  # of every prompt
        self.speculation: SpeculationReport | None = None  # of every request
        self.memory: MemoryReport | None = None
        self.history: History | None = None  # of every request
        self.branches: list[Branch] = []
        self.reuse_report = ReuseReport(0, {}, {})
        self.kinds: list[str] = []
        self.aborted: list[int] = []
        self.flushed = 0
        self.peak = 0
        self.hold = False  # no step happens
        self.info = Ready(
            max_total_tokens=1 << 16,
            max_running_requests=max_running,
            max_requests=max_running + max_queued,
            context_length=context_length,
            page_size=16,
            vocab_size=vocab_size,
            eos_token_ids=[2],
            load_seconds=0.1,
            hidden_size=HIDDEN_SIZE,
            vector_size=HIDDEN_SIZE,
            report=[("memory", "kv", "1 GiB", "65536 tokens x 16 KiB")],
            pid=1,
            wants_resume_points=wants_resume_points,
        )
        self._limit = max_running + max_queued
        self._manual = manual
        self._interval_s = interval_s
        self._ids = itertools.count(1)
        self._died = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

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
        retentions: Sequence[RetentionRequest] = (),
        rendezvous: Rendezvous | None = None,
        adapter: str = "",
        adapter_number: int = 0,
        pictures: Sequence[Picture] = (),
    ) -> FakeStream:
        if self.dead is not None:
            raise Unavailable("the engine is not running any more", code="engine_dead")
        Room({}, (stream.tenant for stream in self.running.values())).check(tenant, self._limit)
        stream = FakeStream(self, next(self._ids), prompt_token_ids, params)
        stream.tenant = tenant
        self.running[stream.request_id] = stream
        self.submitted.append(stream)
        self.namespaces.append(namespace)
        self.authors.append(author)
        self.resume_points.append(list(resume_points))
        self.retentions += [list(retentions)] if retentions else []
        self.rendezvous.append(rendezvous)
        self.pictures.append(tuple(pictures))
        self.peak = max(self.peak, len(self.running))
        if self._stepper is None and not self._manual:
            self._stepper = asyncio.get_running_loop().create_task(self._step_forever())
        return stream

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        return {}

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> State:
        raise Conflict("there are no slots for adapters", code="no_adapters")

    async def unload_adapter(self, name: str, *, timeout_s: float = 300.0) -> State:
        raise NotFound(f"the adapter {name} is not loaded")

    def next_width(self) -> int:
        return next(self._widths)

    async def _step_forever(self) -> None:
        while self.running:
            if not self.hold:
                self.step()
            await asyncio.sleep(self._interval_s or (0.01 if self.hold else 0))
        self._stepper = None

    def step(self) -> None:
        for stream in list(self.running.values())[: self.info.max_running_requests]:
            stream.step()

    def die(self, message: str = "killed by signal 9") -> None:
        self.dead = Failure("EngineError", "engine_dead", message)
        self.fail_all("engine_dead", "the engine died while it worked on this request")
        self._died.set()

    def fail_all(self, code: str, message: str) -> None:
        for stream in list(self.running.values()):
            stream.end(FinishReason.ERROR, Failure("Unavailable", code, message))

    async def died(self) -> Failure:
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    async def state(self) -> State:
        running = min(len(self.running), self.info.max_running_requests)
        self.last_state = State(
            step=1,
            num_running=running,
            num_waiting=len(self.running) - running,
            num_waiting_tokens=0,
            pools=[
                PoolState(name="kv", total=4096, free=4000 - running, running=running, cached=96),
                *self.hybrid_pools,
                PoolState(name="rows", total=64, free=64 - running, running=running),
            ],
            last_step_age_s=0.0,
            oldest_wait_s=0.0,
            counters=self.counters,
            map=[0, 1, 2],
            memory=self.occupied,
        )
        return self.last_state

    async def tree(self, *, begin: bool) -> TreePart:
        return TreePart(0, self.branches, self.kinds)

    async def answer_to(self, question: type[object]) -> ReuseReport:
        return self.reuse_report

    async def ask(self, question: type[object]) -> State:
        return await self.state()

    async def flush_cache(self) -> State:
        self.flushed += 1
        return await self.state()

    async def check_transfers(self, host: str, port: int) -> Checked:
        return Checked(num_bytes=1, bytes_per_s=0.0, transport="shm", layout={}, wrong=[])

    async def release(self, tags: Sequence[str], **how: Any) -> State:
        return await self.state()

    async def resume(self, tags: Sequence[str] = ()) -> State:
        return await self.state()

    sleep = wake_up = resume

    async def close(self, drain_s: float) -> None:
        self.is_ready = False
        self.fail_all("shutting_down", "the server is shutting down")
        if self.dead is None:
            self.dead = Failure("Unavailable", "shutting_down", "the engine was closed")
