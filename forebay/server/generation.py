"""One HTTP request's generations: submitted, detokenized, ended, counted."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from forebay.base.errors import ForebayError
from forebay.requests.sampling_params import MAX_SEED, SamplingParams
from forebay.requests.updates import CacheReport, FinishReason, Update
from forebay.server.cache_usage import cache_usage
from forebay.server.errors import from_failure
from forebay.server.logprobs import Scored
from forebay.server.served_model import Engine, TokenStream
from forebay.text.detokenizer import Detokenizer
from forebay.text.token_bytes import TokenBytes


class Piece(NamedTuple):
    """What one update adds to a choice; `finish` comes with the last."""

    text: str
    tokens: list[Scored]
    finish: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is None where the client sent ids. Others are likely to go on from the first `checkpoints` tokens."""

    token_ids: list[int]
    text: str | None = None
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How every choice of a request is made."""

    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    namespace: str = ""
    count: int = 1  # choices per prompt
    seed: int | None = None
    discard_output: bool = False  # only the prompt's log-probabilities are wanted

    def params_of(self, number: int) -> SamplingParams:
        """Choice `number` of a prompt: the user's seed, or one derived from it, so that choices differ and repeat."""
        return msgspec.structs.replace(self.params, seed=_seed(self.seed, number))


def _seed(seed: int | None, number: int) -> int:
    if seed is None:
        return secrets.randbits(63)
    seed &= MAX_SEED
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") & MAX_SEED


class Choice:
    """One stream on its way to text."""

    def __init__(self, index: int, prompt: Prompt, stream: TokenStream, order: Order, table: TokenBytes) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0
        self.finish: str | None = None
        self.cache = CacheReport()
        self.prompt_scores: list[Scored] = []
        self._table = table
        self._discard = order.discard_output
        self._wants_scores = order.params.logprobs >= 0
        self._detokenizer = Detokenizer(table, order.stop, include_stop=order.include_stop)
        self._pending: list[Scored] = []  # their text is held back

    def feed(self, update: Update) -> Piece:
        """Raises the typed error of a failed request."""
        if update.cache is not None:
            self.cache = update.cache
        if update.prompt_logprobs is not None:
            self.prompt_scores = self._score_prompt(update)
        if update.finish is FinishReason.ERROR:
            self.finish = "error"
            raise from_failure(update.failure)
        if self._discard:
            self.finish = None if update.finish is None else "length"
            return Piece("", [], self.finish)
        return self._advance(update)

    def _advance(self, update: Update) -> Piece:
        tokens = update.token_ids
        # The token that ended it counts, but is no text.
        ending = update.matched_stop is not None and tokens[-1:] == [update.matched_stop]
        text, stopped, used = self._detokenizer.push(tokens[:-1] if ending else tokens)
        self.num_tokens += used
        if self._wants_scores and update.logprobs is not None:
            offsets = self._detokenizer.offsets[-used:] if used else []
            self._pending += map(Scored, tokens[:used], offsets, update.logprobs[:used])
        if stopped is None:
            self.num_tokens += ending
            if update.finish is not None:
                tail = self._detokenizer.finish()
                text, stopped = text + tail.text, tail.stopped
                self.finish = "stop" if stopped is not None else str(update.finish.value)
        if stopped is not None:
            self.finish = "stop"
            self.stream.abort()
        return Piece(text, self._released(everything=self.finish is not None and stopped is None), self.finish)

    def _released(self, *, everything: bool) -> list[Scored]:
        """Scores go out with the text they belong to, so that those behind a stop string never do."""
        if not self._pending:
            return []
        shown = self._detokenizer.num_chars
        count = len(self._pending)
        if not everything:
            count = next((i for i, token in enumerate(self._pending) if token.offset >= shown), count)
        released, self._pending = self._pending[:count], self._pending[count:]
        return released

    def _score_prompt(self, update: Update) -> list[Scored]:
        decoder = Detokenizer(self._table)
        decoder.push(self.prompt.token_ids)
        return list(map(Scored, self.prompt.token_ids, decoder.offsets, update.prompt_logprobs or []))


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request; prompts x `order.count` of them, in this order."""

    choices: list[Choice]
    num_prompt_tokens: int
    table: TokenBytes
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    last_token_at: float | None = None
    disconnected: bool = False
    error: ForebayError | None = None

    @classmethod
    def submit(cls, engine: Engine, table: TokenBytes, prompts: list[Prompt], order: Order) -> Generation:
        """All or nothing: what was submitted is aborted if a later one is refused. Raises what the engine raises."""
        choices: list[Choice] = []
        generation = cls(choices, sum(len(prompt.token_ids) for prompt in prompts), table)
        try:
            for prompt in prompts:
                for number in range(order.count):
                    stream = engine.submit(
                        prompt_token_ids=prompt.token_ids,
                        params=order.params_of(number),
                        priority=order.priority,
                        namespace=order.namespace,
                        checkpoints=prompt.checkpoints,
                    )
                    choices.append(Choice(len(choices), prompt, stream, order, table))
        except BaseException:
            generation.abort()
            raise
        return generation

    def abort(self) -> None:
        for choice in self.choices:
            choice.stream.abort()

    def disconnect(self) -> None:
        self.disconnected = True
        self.abort()

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Every choice's pieces as they come, until all have finished. The first failure ends all of them."""
        try:
            async for choice, update in _merged(self.choices):
                if choice.finish is not None:
                    continue  # it met a stop string before
                now = time.monotonic()
                if update.token_ids:
                    self.first_token_at = self.first_token_at or now
                    self.last_token_at = now
                yield choice, choice.feed(update)
        except ForebayError as error:
            self.error = error
            raise
        finally:
            self.abort()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, with what the prefix cache did. Choices of one prompt count it once."""
        completion = sum(choice.num_tokens for choice in self.choices)
        reports = {id(choice.prompt): choice.cache for choice in reversed(self.choices)}
        cache = cache_usage(list(reports.values())[::-1], self.table)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cache["cached_tokens"]},
            "cache": cache,
        }


async def _merged(choices: list[Choice]) -> AsyncGenerator[tuple[Choice, Update], None]:
    if len(choices) == 1:
        choice = choices[0]
        while choice.finish is None:
            yield choice, await anext(choice.stream)
        return
    arrived: asyncio.Queue[tuple[Choice, Update] | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        async for update in choice.stream:
            arrived.put_nowait((choice, update))
        arrived.put_nowait(None)

    pumps = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        left = len(choices)
        while left and any(choice.finish is None for choice in choices):
            item = await arrived.get()
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
