"""The engine as an asyncio program sees it: submit requests, iterate their updates, watch its health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

from forebay.base.errors import Conflict, Overloaded, PayloadTooLarge, Unavailable, from_code
from forebay.base.room import Room
from forebay.config.adapters import check_name
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.channel import MAX_FRAME_BYTES, FrameTooLarge
from forebay.engine.client.link import EXIT_GRACE_S, EngineLink, Question
from forebay.engine.client.texts import TextEngine
from forebay.engine.frames import (
    TAGS,
    WEIGHTS,
    AddEndTokens,
    AddRequest,
    Checked,
    CheckTransfers,
    FlushCache,
    GetState,
    GetTree,
    LoadAdapter,
    LoadedAdapter,
    Release,
    Resume,
    Shutdown,
    State,
    TreePart,
    UnloadAdapter,
    UpdateWeights,
)
from forebay.engine.stream import Mailbox, Stream
from forebay.formats.hub_names import find_adapter
from forebay.memory.radix_node import OPERATOR
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import Failure


class AsyncEngine(EngineLink, TextEngine):
    """The client of one engine process; belongs to the event loop that it was made in.

        process = launch(config)                  # at once: the engine loads while we do other things
        engine = await AsyncEngine.connect(process)
        await engine.ready()                      # Ready, or the typed reason why not
        async with engine.submit(prompt_token_ids=[1, 2], params=SamplingParams()) as stream:
            async for update in stream: ...
        await engine.close(drain_s=30)

    As a library, `async with AsyncEngine.start(model=...) as engine` does the first and the last lines, and `generate`
    and `chat` accept and return texts.
    """

    @property
    def pid(self) -> int:
        return self._process.pid

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
        adapter: str = "",
        adapter_number: int = 0,
        pictures: Sequence[Picture] = (),
    ) -> Stream:
        """Send a request, with the fields of `AddRequest`; never waits. What the scheduler refuses comes as the
        stream's one update. Raises Unavailable (`starting`, `draining`, `engine_dead`), Overloaded if the engine has as
        many requests as it can run and queue, PayloadTooLarge if the prompt does not fit in a frame."""
        if not self.is_ready:
            raise self._unavailable()
        if self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            raise Overloaded("the engine has yet to read the requests before this one: try again later")
        if len(self._mailboxes) >= self.info.max_requests:
            tenants = (mailbox.tenant for mailbox in self._mailboxes.values())
            Room(self._process.config.scheduling.tenants, tenants).check(tenant, self.info.max_requests)
        frame = AddRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=priority,
            namespace=namespace,
            author=author,
            tenant=tenant,
            resume_points=list(resume_points),
            rendezvous=rendezvous,
            adapter=adapter,
            adapter_number=adapter_number,
            pictures=tuple(pictures),
        )
        try:
            self._send(frame)
        except FrameTooLarge as error:
            raise PayloadTooLarge(f"{len(prompt_token_ids)} tokens, {len(pictures)} images: {error.message}") from error
        mailbox = self._mailboxes[frame.request_id] = Mailbox(frame.request_id, tenant)
        return Stream(mailbox, self._abort)

    def add_end_tokens(self, token_ids: Iterable[int]) -> None:
        """Have these tokens end the answers of requests that are submitted from now on, too."""
        self._send(AddEndTokens(list(token_ids)))

    async def state(self) -> State:
        """The engine's state, answered between two steps. Raises Unavailable when it is starting or dead."""
        return await self._ask(GetState)

    async def tree(self, *, begin: bool) -> TreePart:
        """Return the next part of the cached prefixes, or the first, answered between two steps. Raises as `state`
        does."""
        return cast(TreePart, await self._answer_to(GetTree, begin=begin))

    async def flush_cache(self) -> State:
        """Drop every cached prefix that no request holds; the state is as of after that."""
        return await self._ask(FlushCache)

    async def release(self, tags: Sequence[str], *, mode: str = "wait", timeout_s: float = 300.0) -> State:
        """Release the memory of these tags, () to pause only; see the frame `Release`. Raises the error of a release
        that fails."""
        return await self._ask(Release, tags=list(tags), mode=mode, timeout_s=timeout_s)

    async def resume(self, tags: Sequence[str]) -> State:
        """Map the memory of these tags again, () to end a pause. Raises the error of a wake that fails; the engine then
        sleeps as before."""
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
        """Load the weights of the checkpoint at `path`, on the engine's machine. Raises the error of an update that
        fails."""
        return await self._ask(UpdateWeights, path=path, mode=mode, timeout_s=timeout_s)

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """Return the adapters that requests may name, as of the engine's last report."""
        told = self.info.adapters if self.last_state is None else self.last_state.adapters
        return {adapter.name: adapter for adapter in told}

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> State:
        """Load the adapter at `path`, on the engine's machine, or of that name in the hub's cache there. Raises the
        error of a load that fails."""
        self._check_adapters()
        check_name(name, self._process.config.served_model_name)
        return await self._ask(LoadAdapter, name=name, path=str(find_adapter(path)), replace=replace)

    async def unload_adapter(self, name: str, *, timeout_s: float = 300.0) -> State:
        """Unload an adapter; returns when its slot is free. Raises the error of an unload that fails, and Conflict if
        requests use it after `timeout_s`."""
        self._check_adapters()
        return await self._ask(UnloadAdapter, name=name, timeout_s=timeout_s)

    def _check_adapters(self) -> None:
        if not self._process.config.adapters.enabled:
            raise Conflict("this server has no slots for adapters: start it with --enable-lora", code="no_adapters")

    async def check_transfers(self, host: str, port: int) -> Checked:
        """Fetch a test pattern from the prefill server at this address; for decode engines. Raises the error of a check
        that fails."""
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

    async def _ask(self, question: type[Question], **what: Any) -> State:
        state: State = await self._answer_to(question, **what)
        if state.refused is not None:
            raise from_code(state.refused.kind, state.refused.message, state.refused.code)
        return state
