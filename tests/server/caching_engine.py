"""An engine whose scheduler and prefix cache are the real ones, over a model that hashes, in the server's own loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import msgspec

from forebay.engine.client.recordings import Recordings
from forebay.engine.frames import AddRequest, GetReuse, GetTree, ReuseReport, State, TreePart
from forebay.engine.loop.surveys import Surveys, of_cache
from forebay.engine.stream import Mailbox, Stream
from forebay.memory.radix_node import OPERATOR
from forebay.memory.retention import RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import Failure, Update
from tests.engine.engine_fakes import CONFIG, READY, changed, fake_core

PAGE = CONFIG.memory.page_size


class CachingEngine:
    """Steps while there is something to do; of `AsyncEngine` all that these tests need."""

    def __init__(self) -> None:
        self.core, self.runner = fake_core(changed(max_total_tokens=1 << 16))
        self.info = msgspec.structs.replace(READY, max_total_tokens=1 << 16, slot_bytes={"kv": 64 * PAGE})
        self._surveys = Surveys(self.core.scheduler.pools.cache)
        self.dead: Failure | None = None
        self.last_state: State | None = None
        self.last_tick_age_s = 0.0
        self.is_ready = True
        self.link = self
        self.recordings = Recordings(None, dict, has_tokens=False)
        self._ids = itertools.count(1)
        self._mailboxes: dict[int, Mailbox] = {}
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
    ) -> Stream:
        wanted = AddRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=priority,
            namespace=namespace,
            author=author,
            tenant=tenant,
            resume_points=list(resume_points),
            retentions=list(retentions),
            adapter=adapter,
            pictures=tuple(pictures),
        )
        mailbox = self._mailboxes[wanted.request_id] = Mailbox(wanted.request_id)
        self._tell(self.core.add(wanted))
        if self._stepper is None:
            self._stepper = asyncio.get_running_loop().create_task(self._step_until_idle())
        return Stream(mailbox, lambda request_id: self._tell(self.core.abort(request_id)))

    async def _step_until_idle(self) -> None:
        await asyncio.sleep(0)  # what is submitted in one turn of the loop starts together
        while not self.core.idle:
            self._tell(self.core.step())
            await asyncio.sleep(0)
        self._stepper = None

    def _tell(self, updates: list[Update]) -> None:
        for update in updates:
            mailbox = self._mailboxes[update.request_id]
            if update.finish is not None:
                del self._mailboxes[update.request_id]
            mailbox.put(update)

    async def state(self) -> State:
        self.last_state = self.core.stats.frame(self.core.scheduler, time.monotonic())
        return self.last_state

    async def tree(self, *, begin: bool) -> TreePart:
        return self._surveys.part(GetTree(begin=begin), time.monotonic())

    async def answer_to(self, question: type[GetReuse]) -> TreePart | ReuseReport:
        return of_cache(question(), self._surveys, self.core.scheduler, time.monotonic())

    async def ask(self, question: type[object]) -> State:
        return await self.state()

    async def flush_cache(self) -> State:
        self.core.scheduler.flush_cache()
        return await self.state()

    async def died(self) -> Failure:
        never: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self, drain_s: float) -> None:
        self.is_ready = False
        self.dead = Failure("Unavailable", "shutting_down", "the engine was closed")
