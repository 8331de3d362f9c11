"""An engine of our own for the length of a command: text in, text out, no server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from forebay.base.log import setup_logging
from forebay.config.config import Config
from forebay.config.disaggregation import refuse_without_server
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.lifecycle.launch import launch
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason
from forebay.text.detokenizer import Detokenizer
from forebay.text.end_tokens import end_tokens
from forebay.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Took:
    """Durations of one answer; times are `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def came(self) -> None:
        """Record the arrival time of a piece of output."""
        self.last = time.monotonic()
        self.first = self.first or self.last

    def __str__(self) -> str:
        if not self.first:
            return "no answer"
        rate = (self.output_tokens - 1) / (self.last - self.first) if self.last > self.first else 0.0
        speed = f", {rate:.1f} tok/s" if self.output_tokens > 1 and rate else ""
        reused = f", {self.cached_tokens} of {self.prompt_tokens} prompt tokens reused" if self.prompt_tokens else ""
        return f"{self.output_tokens} tokens{speed}, first after {self.first - self.began:.2f} s{reused}"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """An engine in this process group, with its tokenizer. `adapter` names the adapter that answers, "" for the model
    alone."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    context_length: int
    sampling: SamplingParams  # where nobody says otherwise
    adapter: str = ""

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, took: Took | None = None
    ) -> AsyncIterator[str]:
        """The continuation, piece by piece; `took` counts it. Raises the request's typed error if it fails."""
        text = Detokenizer(self.tokenizer.table)
        stream = self.engine.submit(prompt_token_ids=list(prompt_token_ids), params=params, adapter=self.adapter)
        async with stream as updates:
            async for update in updates:
                if update.finish is FinishReason.ERROR and update.failure is not None:
                    raise update.failure.error
                if took is not None:
                    took.came()
                    took.output_tokens += len(update.token_ids)
                    took.cached_tokens = update.cache.cached_tokens if update.cache else took.cached_tokens
                piece = text.push(update.token_ids).text
                if piece:
                    yield piece
        tail = text.finish().text
        if tail:
            yield tail

    def room(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return how many tokens may still be generated: the requested number, or the rest of the context."""
        left = max(1, self.context_length - num_prompt_tokens)
        return left if max_tokens is None else min(left, max_tokens)


@contextlib.asynccontextmanager
async def local_model(config: Config, adapter: str = "") -> AsyncIterator[LocalModel]:
    """A loaded engine and its tokenizer; the tokenizer is read while the engine loads. `adapter` is the one that
    answers."""
    refuse_without_server("this command", config)
    setup_logging(config.engine.log_level, process="client")
    engine = await AsyncEngine.connect(launch(config.engine))
    try:
        tokenizer = Tokenizer.from_path(config.engine.model_path, config.server.chat_template)
        engine.add_end_tokens(await asyncio.to_thread(end_tokens, tokenizer))
        ready = await engine.ready()
        sampling = config.server.sampling
        defaults = SamplingParams.defaults(sampling.values, sampling.source)
        yield LocalModel(engine, tokenizer, ready.context_length, defaults, adapter)
    finally:
        await engine.close(drain_s=0.0)
