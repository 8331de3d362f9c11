"""Texts for asyncio programs: what `AsyncEngine` does beyond token ids."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from forebay.base.errors import Conflict
from forebay.engine.client.choice import weights_changed
from forebay.engine.client.writing import Prompt, RequestOutput, TextDelta, Writing, chat_prompt, output_of
from forebay.engine.frames import Ready
from forebay.engine.lifecycle.launch import EngineProcess, launch
from forebay.engine.stream import Stream
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Update
from forebay.text.answers.probes import Findings, find_formats
from forebay.text.end_tokens import end_tokens
from forebay.text.resumption import Message
from forebay.text.tokenizer import Tokenizer


class TextEngine(ABC):
    """Texts over an engine that takes token ids; only for engines that `start` made."""

    _tokenizer: Tokenizer | None = None
    _formats: Findings | None = None  # since the first conversation
    default_sampling_params = SamplingParams()  # the model's own, where it was made by `start`
    on_sleep: Callable[[], None]
    on_wake: Callable[[], None]

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
            engine._tokenizer = await asyncio.to_thread(Tokenizer.from_path, path, config.server.chat_template)
            engine.on_sleep, engine.on_wake = engine._tokenizer.release_memory, engine._tokenizer.wake
            engine.add_end_tokens(await asyncio.to_thread(end_tokens, engine._tokenizer))
            engine.default_sampling_params = SamplingParams.defaults(sampling.values, sampling.source)
            await engine.ready()
            yield engine
        finally:
            await engine.close(drain_s=0.0)

    @abstractmethod
    def add_end_tokens(self, token_ids: Iterable[int]) -> None:
        """Have these tokens end answers, too."""

    @classmethod
    @abstractmethod
    async def connect(cls, process: EngineProcess) -> Self:
        """Connect to the engine process and return the client. The client owns `process` from then on."""

    @abstractmethod
    async def ready(self) -> Ready:
        """Wait until the engine has loaded its model, and return its report. Raises what loading raised."""

    @abstractmethod
    async def close(self, drain_s: float) -> None:
        """Refuse new requests, wait up to `drain_s` seconds for those that run, and end the engine process."""

    @property
    @abstractmethod
    def info(self) -> Ready: ...

    @abstractmethod
    def submit(
        self,
        *,
        prompt_token_ids: list[int],
        params: SamplingParams,
        resume_points: Sequence[int] = (),
        adapter: str = "",
    ) -> Stream:
        """Send a request to the engine and return its stream of updates. `resume_points` are prompt lengths at which
        recurrent states are worth keeping; `adapter` names a loaded adapter."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode`, `decode`, `encode_chat`."""
        if self._tokenizer is None:
            raise Conflict("this engine knows token ids alone: make it with AsyncEngine.start", code="no_tokenizer")
        return self._tokenizer

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
        output = await asyncio.to_thread(output_of, prompt, self.tokenizer)
        async with contextlib.aclosing(self._write(output, sampling_params, (), lora)) as deltas:
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
        if self._formats is None:
            self._formats = await asyncio.to_thread(find_formats, self.tokenizer)
        rendered = partial(chat_prompt, messages, self.tokenizer, self._formats, variables, with_places=places)
        found = await asyncio.to_thread(rendered)
        output = output_of(found.token_ids, self.tokenizer)
        async with contextlib.aclosing(self._write(output, sampling_params, found.resume_points, lora)) as deltas:
            async for delta in deltas:
                yield delta

    async def _write(
        self, output: RequestOutput, params: SamplingParams | None, places: Sequence[int], adapter: str
    ) -> AsyncGenerator[TextDelta, None]:
        writing = Writing(output, params or self.default_sampling_params, self.tokenizer)
        async with contextlib.AsyncExitStack() as undo:
            streams: list[Stream] = []
            for asked in writing.asked:
                stream = self.submit(
                    prompt_token_ids=output.prompt_token_ids, params=asked, resume_points=places, adapter=adapter
                )
                streams.append(await undo.enter_async_context(stream))
            writing.begin(streams)
            async with contextlib.aclosing(_first_come(streams)) as updates:
                async for index, update in updates:
                    told = output.outputs[index]
                    if told.finish_reason is None:
                        if update.restarted and told.token_ids:
                            raise weights_changed(len(told.token_ids))
                        delta = writing.take(index, update)
                        if output.error is not None:
                            raise output.error
                        yield delta
                    if writing.finished:
                        return


async def _first_come(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Update], None]:
    """The updates of all streams as they come, with the stream's place."""
    coming = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                index, update = coming.pop(task), task.result()
                if update.finish is None:
                    coming[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, update
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
