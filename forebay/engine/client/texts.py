"""Texts for asyncio programs, over streams of token ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Protocol

from forebay.engine.client.choice import weights_changed
from forebay.engine.client.writing import Prompt, RequestOutput, TextDelta, Writing, chat_prompt, output_of
from forebay.engine.stream import Stream
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Update
from forebay.text.answers.probes import Findings, find_formats
from forebay.text.resumption import Message
from forebay.text.tokenizer import Tokenizer


class Submit(Protocol):
    """`AsyncEngine.submit`, as far as texts need it."""

    def __call__(
        self,
        *,
        prompt_token_ids: list[int],
        params: SamplingParams,
        resume_points: Sequence[int] = (),
        adapter: str = "",
    ) -> Stream: ...


class TextStreams:
    """Texts over an engine that takes token ids by `submit`. `defaults` are the parameters of calls without any."""

    def __init__(self, tokenizer: Tokenizer, defaults: SamplingParams, submit: Submit) -> None:
        self.tokenizer, self.defaults, self._submit = tokenizer, defaults, submit
        self._formats: Findings | None = None  # since the first conversation

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None, adapter: str
    ) -> AsyncGenerator[TextDelta, None]:
        """Complete a prompt; see `AsyncEngine.generate`."""
        output = await asyncio.to_thread(output_of, prompt, self.tokenizer)
        async with contextlib.aclosing(self._write(output, params, (), adapter)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None,
        adapter: str,
        variables: dict[str, Any],
        *,
        with_places: bool,
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation; see `AsyncEngine.chat`. `with_places`: the engine wants the ends of its turns."""
        if self._formats is None:
            self._formats = await asyncio.to_thread(find_formats, self.tokenizer)
        rendered = partial(chat_prompt, messages, self.tokenizer, self._formats, variables, with_places=with_places)
        found = await asyncio.to_thread(rendered)
        output = output_of(found.token_ids, self.tokenizer)
        async with contextlib.aclosing(self._write(output, params, found.resume_points, adapter)) as deltas:
            async for delta in deltas:
                yield delta

    async def _write(
        self, output: RequestOutput, params: SamplingParams | None, places: Sequence[int], adapter: str
    ) -> AsyncGenerator[TextDelta, None]:
        writing = Writing(output, params or self.defaults, self.tokenizer)
        async with contextlib.AsyncExitStack() as undo:
            streams: list[Stream] = []
            for asked in writing.asked:
                stream = self._submit(
                    prompt_token_ids=output.prompt_token_ids, params=asked, resume_points=places, adapter=adapter
                )
                streams.append(await undo.enter_async_context(stream))
            writing.begin(streams)
            async with contextlib.aclosing(_first_come(streams)) as updates:
                async for index, update in updates:
                    choice = output.outputs[index]
                    if choice.finish_reason is None:
                        if update.restarted and choice.token_ids:
                            raise weights_changed(len(choice.token_ids))
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
