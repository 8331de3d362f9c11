"""One HTTP request's generations: submitted, detokenized, ended, counted."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.engine.async_engine import AsyncEngine
from forebay.engine.stream import Stream
from forebay.requests.sampling_params import MAX_SEED, Grammar, SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import CacheReport, FinishReason, SpeculationReport, Update
from forebay.server.cache_usage import cache_usage
from forebay.server.errors import from_failure
from forebay.server.logprobs import Scored
from forebay.text.answers.parts import CallEnded, Part
from forebay.text.answers.reading import AnswerReader
from forebay.text.detokenizer import Delta, Detokenizer
from forebay.text.token_bytes import TokenBytes


class Piece(NamedTuple):
    """What one update adds to a choice; `finish` comes with the last. Where answers are read, `parts` are what `text`
    would be."""

    text: str
    tokens: list[Scored]
    finish: str | None
    parts: Sequence[Part] = ()


class Reading(NamedTuple):
    """How answers to a prompt are read: by a reader each, from the bytes in `table`, to the end of the first call where
    there may be one alone."""

    make: Callable[[], AnswerReader]
    table: TokenBytes
    one_call: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is None where the client sent ids. Others are likely to go on from the first `resume_points` tokens. The
    answers are what `grammar` says, or what those to all prompts of the request must be."""

    token_ids: list[int]
    text: str | None = None
    resume_points: tuple[int, ...] = ()
    reading: Reading | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How every choice of a request is made."""

    params: SamplingParams
    namespace: str
    author: str  # whose prompts the answer may tell of
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    count: int = 1  # choices per prompt
    halves: Sequence[Rendezvous | None] = ()  # in a role: where the other half of each prompt's choices is
    seed: int | None = None
    discard_output: bool = False  # only the prompt's log-probabilities are wanted

    def params_of(self, number: int, grammar: Grammar | None = None) -> SamplingParams:
        """Choice `number` of a prompt: the user's seed, or one derived from it, so that choices differ and repeat. A
        prompt's own grammar comes before that of all."""
        grammar = grammar or self.params.grammar
        return msgspec.structs.replace(self.params, seed=_seed(self.seed, number), grammar=grammar)


def _seed(seed: int | None, number: int) -> int:
    if seed is None:
        return secrets.randbits(63)
    seed &= MAX_SEED
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") & MAX_SEED


class Sink(Protocol):
    """Takes what becomes of a request's choices, in the turn of the event loop in which it does."""

    def text(self, choice: Choice, text: str) -> None:
        """A piece that is text and nothing else: the most common one by far."""

    def piece(self, choice: Choice, piece: Piece) -> None: ...

    def restart(self, choice: Choice) -> None:
        """What it was given of this choice counts for nothing. Raises what the client is told if that is too late."""
        ...


class Choice:
    """One stream on its way to text."""

    def __init__(self, index: int, prompt: Prompt, stream: Stream, order: Order, table: TokenBytes) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.finish: str | None = None
        self.cache = CacheReport()
        self.speculation: SpeculationReport | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.weight_version = 0
        self._table = table
        self._order = order
        self._discard = order.discard_output
        self._wants_scores = order.params.logprobs >= 0
        self._scores_per_token = 1 + max(0, order.params.logprobs)
        # A token is its text and no more: nothing is to be looked for, scored or dropped.
        self.is_plain = not (order.stop or self._wants_scores or self._discard or prompt.reading)
        self.restart()

    def restart(self) -> None:
        """What came so far counts for nothing."""
        self.num_tokens = 0
        self.num_calls = self.num_reasoning_tokens = 0
        reading = self.prompt.reading
        self._reader = None if reading is None else reading.make()
        table = self._table if reading is None else reading.table
        self._detokenizer = Detokenizer(table, self._order.stop, include_stop=self._order.include_stop)
        self._pending: list[Scored] = []  # their text is held back

    def feed_tokens(self, token_ids: list[int]) -> str:
        """The text that more tokens add to a plain choice."""
        self.num_tokens += len(token_ids)
        return "".join(map(self._detokenizer.push_token, token_ids))

    def feed(self, update: Update) -> Piece:
        """Raises the typed error of a failed request."""
        if update.cache is not None:
            self.cache, self.weight_version = update.cache, update.weight_version
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.speculation = update.speculation
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
        parts: list[Part] = []
        text, stopped, used = self._push(tokens[:-1] if ending else tokens, parts)
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
        if self._reader is not None:
            text, parts = "", self._read(self._reader, text, parts)
        scores = self._released(everything=self.finish is not None and stopped is None)
        return Piece(text, scores, self.finish, parts)

    def _push(self, token_ids: list[int], parts: list[Part]) -> Delta:
        """Where the answer is read, one token after the other: each is of the thinking or is not."""
        if self._reader is None:
            return self._detokenizer.push(token_ids)
        for used, token in enumerate(token_ids, 1):
            text, stopped, _ = self._detokenizer.push([token])
            thinks = self._reader.thinking
            parts += self._reader.push(text)
            self.num_reasoning_tokens += thinks or self._reader.thinking
            if stopped is not None:
                return Delta("", stopped, used)
        return Delta("", None, len(token_ids))

    def _read(self, reader: AnswerReader, tail: str, parts: list[Part]) -> list[Part]:
        """`parts` with those of the text's end, up to which they go: where one call is allowed, that of the first."""
        parts += reader.push(tail)
        if self.finish is not None:
            parts += reader.finish()
        end = next((i for i, part in enumerate(parts, 1) if isinstance(part, CallEnded)), None)
        if end is not None and self.prompt.reading is not None and self.prompt.reading.one_call:
            parts = parts[:end]
            if self.finish is None:
                self.finish = "stop"
                self.stream.abort()
        self.num_calls += sum(isinstance(part, CallEnded) for part in parts)
        if self.finish == "stop" and self.num_calls:
            self.finish = "tool_calls"
        return parts

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

    @property
    def num_scores(self) -> int:
        """How many log-probabilities the whole answer has."""
        num_tokens = len(self.prompt_logprobs or ()) + (self.num_tokens if self._wants_scores else 0)
        return num_tokens * self._scores_per_token

    def prompt_scores(self) -> list[Scored]:
        """Takes time by the prompt's length."""
        if self.prompt_logprobs is None:
            return []
        decoder = Detokenizer(self._table)
        decoder.push(self.prompt.token_ids)
        return list(map(Scored, self.prompt.token_ids, decoder.offsets, self.prompt_logprobs))


class Generation:
    """All choices of one HTTP request; prompts x `order.count` of them, in this order."""

    def __init__(self, choices: list[Choice], num_prompt_tokens: int, table: TokenBytes) -> None:
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.started_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.disconnected = False
        self.error: Exception | None = None
        self.over = False  # all choices have finished, or one has failed
        self._table = table
        self._has_pieces = False
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    @classmethod
    def submit(cls, engine: AsyncEngine, table: TokenBytes, prompts: list[Prompt], order: Order) -> Generation:
        """All or nothing: what was submitted is aborted if a later one is refused. Raises what the engine raises."""
        choices: list[Choice] = []
        halves = iter(order.halves or repeat(None))
        generation = cls(choices, sum(len(prompt.token_ids) for prompt in prompts), table)
        try:
            for prompt in prompts:
                for number in range(order.count):
                    stream = engine.submit(
                        prompt_token_ids=prompt.token_ids,
                        params=order.params_of(number, prompt.grammar),
                        priority=order.priority,
                        namespace=order.namespace,
                        author=order.author,
                        resume_points=prompt.resume_points,
                        rendezvous=next(halves),
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

    def deliver(self, sink: Sink) -> None:
        """From now on, give `sink` every choice's pieces as they come, until all have finished. The first failure ends
        all of them."""
        for choice in self.choices:
            choice.stream.deliver(_Feed(self, choice, sink))

    async def begun(self) -> None:
        """Wait for the first piece, or for the end. Raises what ended it where there was no piece."""
        await self._begun.wait()
        if self.error is not None and not self._has_pieces:
            raise self.error

    async def ended(self) -> None:
        """Wait for the end of all choices. Raises the first failure."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    def saw_token(self) -> None:
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    def handed_over(self) -> None:
        """A piece, to the sink."""
        self._has_pieces = True
        self._begun.set()
        if all(choice.finish is not None for choice in self.choices):
            self._end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.over = True
        self._begun.set()
        self._ended.set()
        self.abort()

    @property
    def num_scores(self) -> int:
        return sum(choice.num_scores for choice in self.choices)

    def _reasoning(self) -> dict[str, Any]:
        if all(choice.prompt.reading is None for choice in self.choices):
            return {}
        num_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
        return {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, with what the prefix cache did. Choices of one prompt count it once."""
        completion = sum(choice.num_tokens for choice in self.choices)
        reports = {id(choice.prompt): choice.cache for choice in reversed(self.choices)}
        cache = cache_usage(list(reports.values())[::-1], self._table)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cache["cached_tokens"]},
            **self._reasoning(),
            "weight_version": max(choice.weight_version for choice in self.choices),
            "cache": cache,
        }


class _Feed:
    """A choice's `Receiver`: its news become pieces at once."""

    __slots__ = ("_choice", "_generation", "_sink")

    def __init__(self, generation: Generation, choice: Choice, sink: Sink) -> None:
        self._generation = generation
        self._choice = choice
        self._sink = sink

    def tokens(self, token_ids: list[int]) -> None:
        generation, choice = self._generation, self._choice
        if not choice.is_plain or generation.first_token_at is None:
            self.update(Update(choice.stream.request_id, token_ids))
        elif not generation.over:
            generation.saw_token()
            try:
                text = choice.feed_tokens(token_ids)
                if text:
                    self._sink.text(choice, text)
            except Exception as error:
                generation.fail(error)

    def update(self, update: Update) -> None:
        generation, choice = self._generation, self._choice
        if generation.over or choice.finish is not None:
            return  # it met a stop string before
        if update.token_ids:
            generation.saw_token()
        try:
            if update.restarted:
                self._sink.restart(choice)
                choice.restart()
            self._sink.piece(choice, choice.feed(update))
            generation.handed_over()
        except Exception as error:
            generation.fail(error)
