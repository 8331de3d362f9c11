"""The engine as an asyncio program sees it: submit requests, iterate their updates, watch its health."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any, Self, cast

from forebay.base.errors import Conflict, Overloaded, PayloadTooLarge
from forebay.base.loop_clock import LoopClock
from forebay.base.room import Room
from forebay.config.adapters import check_name
from forebay.config.engine_config import DisaggregationMode, EngineConfig
from forebay.engine.channel import FrameTooLarge
from forebay.engine.client.link import EngineLink
from forebay.engine.client.texts import TextStreams
from forebay.engine.client.writing import Prompt, TextDelta
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
    Ready,
    Release,
    Resume,
    State,
    TreePart,
    UnloadAdapter,
    UpdateWeights,
)
from forebay.engine.lifecycle.launch import EngineProcess, launch
from forebay.engine.stream import Stream
from forebay.formats.hub_names import find_adapter
from forebay.memory.radix_node import OPERATOR
from forebay.memory.retention import RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.text.end_tokens import end_tokens
from forebay.text.resumption import Message
from forebay.text.tokenizer import Tokenizer


class AsyncEngine:
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

    def __init__(self, link: EngineLink) -> None:
        self.link = link  # the connection, with the engine's health
        self._ids = itertools.count(1)
        self._texts: TextStreams | None = None  # of an engine that `start` made

    @classmethod
    async def connect(cls, process: EngineProcess, clock: LoopClock | None = None) -> Self:
        """Take over the channel of a launched engine, which may still be loading. Owns `process` from here on."""
        return cls(await EngineLink.connect(process, clock))

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, model: str | None = None, **flags: Any) -> AsyncIterator[Self]:
        """An engine for the length of an `async with`, ready when the body begins. `flags` are those of the command
        line, with underscores: `AsyncEngine.start(model="...", context_length=4096)`."""
        from forebay.config.disaggregation import refuse_without_server
        from forebay.config.resolve import resolve
        from forebay.config.sources import refuse_server_settings

        refuse_server_settings(flags)
        config = resolve({"model": model, **flags})
        refuse_without_server("AsyncEngine.start", config)
        engine = await cls.connect(launch(config.engine))
        try:
            path, sampling = config.engine.model_path, config.server.sampling
            tokenizer = await asyncio.to_thread(Tokenizer.from_path, path, config.server.chat_template)
            defaults = SamplingParams.defaults(sampling.values, sampling.source)
            engine._texts = TextStreams(tokenizer, defaults, engine.submit)
            engine.link.on_sleep, engine.link.on_wake = tokenizer.release_memory, tokenizer.wake
            engine.add_end_tokens(await asyncio.to_thread(end_tokens, tokenizer))
            await engine.ready()
            yield engine
        finally:
            await engine.close(drain_s=0.0)

    @property
    def info(self) -> Ready:
        """The engine's description of itself when it was ready; raises Unavailable (code `starting`) before."""
        return self.link.info

    async def ready(self) -> Ready:
        """Wait until the engine is up. Raises its typed error if it dies before."""
        return await self.link.ready()

    # -- texts ---------------------------------------------------------------------------------------------------------

    @property
    def texts(self) -> TextStreams:
        """The tokenizer and the default parameters. Raises Conflict for an engine that `start` did not make."""
        if self._texts is None:
            raise Conflict("this engine knows token ids alone: make it with AsyncEngine.start", code="no_tokenizer")
        return self._texts

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode`, `decode`, `encode_chat`."""
        return self.texts.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The model's own parameters, of calls that give none."""
        return self.texts.defaults

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str = ""
    ) -> AsyncGenerator[TextDelta, None]:
        """Complete a prompt: text, token ids, or `{"prompt": ..}` or `{"prompt_token_ids": ..}` with these. Yields text
        as it is generated, of all `n` outputs in turn.

            async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(delta.text, end="", flush=True)

        `lora` names the loaded adapter to apply, "" for the model alone.

        Leaving the iteration or cancelling it ends the request. Raises InvalidRequest for invalid arguments, and the
        typed error of a request that fails. Raises Unavailable (code `weights_changed`) if an update of the weights
        restarts the request after tokens were yielded.
        """
        async with contextlib.aclosing(self.texts.generate(prompt, sampling_params, lora)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str = "",
        **variables: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation; a text is a message of the user. `variables` go to the chat template (`tools`,
        `enable_thinking`); `continue_final_message=True` continues the assistant's last message. All else as in
        `generate`."""
        places = self.info.wants_resume_points
        answer = self.texts.chat(messages, sampling_params, lora, variables, with_places=places)
        async with contextlib.aclosing(answer) as deltas:
            async for delta in deltas:
                yield delta

    # -- token ids -----------------------------------------------------------------------------------------------------

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
        """Send a request, with the fields of `AddRequest`; never waits. What the scheduler refuses comes as the
        stream's one update. Raises Unavailable (`starting`, `draining`, `engine_dead`), Overloaded if the engine has as
        many requests as it can run and queue, PayloadTooLarge if the prompt does not fit in a frame."""
        link = self.link
        if not link.is_ready:
            raise link.unavailable()
        if link.is_full:
            raise Overloaded("the engine has yet to read the requests before this one: try again later")
        if link.num_requests >= link.info.max_requests:
            Room(link.process.config.scheduling.tenants, link.mailboxes.tenants).check(tenant, link.info.max_requests)
        frame = AddRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=priority,
            namespace=namespace,
            author=author,
            tenant=tenant,
            resume_points=list(resume_points),
            retentions=list(retentions),
            rendezvous=rendezvous,
            adapter=adapter,
            adapter_number=adapter_number,
            pictures=tuple(pictures),
        )
        try:
            link.send(frame)
        except FrameTooLarge as error:
            raise PayloadTooLarge(f"{len(prompt_token_ids)} tokens, {len(pictures)} images: {error.message}") from error
        return link.mailboxes.open(frame.request_id, tenant)

    def add_end_tokens(self, token_ids: Iterable[int]) -> None:
        """Have these tokens end the answers of requests that are submitted from now on, too."""
        self.link.send(AddEndTokens(list(token_ids)))

    async def state(self) -> State:
        """The engine's state, answered between two steps. Raises Unavailable when it is starting or dead."""
        return await self.link.ask(GetState)

    async def tree(self, *, begin: bool) -> TreePart:
        """Return the next part of the cached prefixes, or the first, answered between two steps. Raises as `state`
        does."""
        return cast(TreePart, await self.link.answer_to(GetTree, begin=begin))

    async def flush_cache(self) -> State:
        """Drop every cached prefix that no request holds; the state is as of after that."""
        return await self.link.ask(FlushCache)

    async def release(self, tags: Sequence[str], *, mode: str = "wait", timeout_s: float = 300.0) -> State:
        """Release the memory of these tags, () to pause only; see the frame `Release`. Raises the error of a release
        that fails."""
        return await self.link.ask(Release, tags=list(tags), mode=mode, timeout_s=timeout_s)

    async def resume(self, tags: Sequence[str]) -> State:
        """Map the memory of these tags again, () to end a pause. Raises the error of a wake that fails; the engine then
        sleeps as before."""
        if WEIGHTS in tags:
            asyncio.get_running_loop().call_soon(self.link.on_wake)  # once it has been asked
        return await self.link.ask(Resume, tags=list(tags))

    async def sleep(self, tags: Sequence[str] = TAGS) -> State:
        """Give memory back when all that runs has ended."""
        return await self.release(tags)

    async def wake_up(self, tags: Sequence[str] = ()) -> State:
        """Take memory again; () for all that was given back."""
        return await self.resume(tags or (await self.state()).memory.released)

    async def update_weights(self, path: str, *, mode: str = "wait", timeout_s: float = 300.0) -> State:
        """Load the weights of the checkpoint at `path`, on the engine's machine. Raises the error of an update that
        fails."""
        return await self.link.ask(UpdateWeights, path=path, mode=mode, timeout_s=timeout_s)

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """Return the adapters that requests may name, as of the engine's last report."""
        adapters = self.info.adapters if self.link.last_state is None else self.link.last_state.adapters
        return {adapter.name: adapter for adapter in adapters}

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> State:
        """Load the adapter at `path`, on the engine's machine, or of that name in the hub's cache there. Raises the
        error of a load that fails."""
        _check_adapters(self.link.process.config)
        check_name(name, self.link.process.config.served_model_name)
        return await self.link.ask(LoadAdapter, name=name, path=str(find_adapter(path)), replace=replace)

    async def unload_adapter(self, name: str, *, timeout_s: float = 300.0) -> State:
        """Unload an adapter; returns when its slot is free. Raises the error of an unload that fails, and Conflict if
        requests use it after `timeout_s`."""
        _check_adapters(self.link.process.config)
        return await self.link.ask(UnloadAdapter, name=name, timeout_s=timeout_s)

    async def check_transfers(self, host: str, port: int) -> Checked:
        """Fetch a test pattern from the prefill server at this address; for decode engines. Raises the error of a check
        that fails."""
        mode = self.link.process.config.disaggregation.mode
        if mode is not DisaggregationMode.DECODE:
            raise Conflict(f"the server's --disaggregation-mode is {mode}: ask a decode server", code="not_decode")
        checked = (await self.link.ask(CheckTransfers, host=host, port=port)).checked
        return cast(Checked, checked)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, give the running ones `drain_s`, fail the rest (`shutting_down`), end and reap the
        engine. Idempotent; returns within `drain_s` and about two seconds. One that still loads is killed: there is
        nothing to lose."""
        await self.link.close(drain_s)


def _check_adapters(config: EngineConfig) -> None:
    if not config.adapters.enabled:
        raise Conflict("this server has no slots for adapters: start it with --enable-lora", code="no_adapters")
