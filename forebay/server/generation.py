"""One HTTP request's generations: submitted, detokenized, ended, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from forebay.engine.async_engine import AsyncEngine
from forebay.engine.stream import Stream
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, FinishReason, MemoryReport, SpeculationReport, Update
from forebay.server.cache_usage import cache_usage
from forebay.server.errors import from_failure
from forebay.server.logprobs import Scored, WaitingScores
from forebay.server.order import Order, Prompt
from forebay.text.answers.parts import CallEnded, Part, Said, Thought
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
        self.stopped: str | None = None  # the stop string that ended it
        self.cache = CacheReport()
        self.speculation: SpeculationReport | None = None
        self.memory = MemoryReport()
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.weight_version = 0
        self._table = table
        self._order = order
        self._discard = order.discard_output
        self._wants_scores = order.params.logprobs >= 0
        self._scores_per_token = 1 + max(0, order.params.logprobs)
        self._one_call = prompt.reading is not None and prompt.reading.one_call
        self._tells_thinking = prompt.reading is None or prompt.reading.tells_thinking
        # A token is its text and no more: nothing is to be looked for, scored or dropped.
        self.is_plain = not (order.params.stop or order.params.stop_regex or self._wants_scores or self._discard)
        self.restart()

    def restart(self) -> None:
        """What came so far counts for nothing."""
        self.num_tokens = 0
        self.num_calls = self.num_reasoning_tokens = 0
        reading = self.prompt.reading
        self._reader = None if reading is None else reading.make()
        table = self._table if reading is None else reading.table
        how = self._order.params
        self._detokenizer = Detokenizer(
            table,
            how.stop,
            patterns=how.stop_regex,
            include_stop=how.include_stop_str_in_output,
            min_tokens=how.min_tokens,
        )
        self._waiting = WaitingScores(self._detokenizer, self._reader, tells_thinking=self._tells_thinking)

    def feed_tokens(self, token_ids: list[int]) -> str | Piece:
        """What more tokens add to a plain choice; most often text and nothing else."""
        if self._reader is None:
            self.num_tokens += len(token_ids)
            return "".join(map(self._detokenizer.push_token, token_ids))
        if self.finish is not None:
            return ""
        parts: list[Part] = []
        for token in token_ids:
            self.num_tokens += 1
            self._take(self._reader, self._detokenizer.push_token(token), parts)
            if self._is_enough(parts):
                break
        said = [part.text for part in parts if type(part) is Said]
        if len(said) == len(parts):
            return "".join(said)
        told = self._told(parts)
        return Piece("", [], self.finish, told)

    def feed(self, update: Update) -> Piece:
        """Raises the typed error of a failed request."""
        if update.cache is not None:
            self.cache, self.weight_version = update.cache, update.weight_version
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.speculation = update.speculation
        self.memory = update.memory or self.memory
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
        if used and self._wants_scores and update.logprobs is not None:
            self._waiting.add(tokens[:used], update.logprobs[:used])
        if stopped is None:
            self.num_tokens += ending
            if update.finish is not None:
                tail = self._detokenizer.finish()
                text, stopped = text + tail.text, tail.stopped
                self.finish = str(update.finish.value)
        if stopped is not None:
            self.finish, self.stopped = "stop", stopped
            self.stream.abort()
        if self._reader is not None:
            parts += self._reader.push(text) if text else []
            parts += self._reader.finish() if self.finish is not None else []
            text, parts = "", self._told(parts)
        everything = self.finish is not None and stopped is None
        scores = self._waiting.released(everything=everything, ended=self.finish is not None)
        return Piece(text, scores, self.finish, parts)

    def _push(self, token_ids: list[int], parts: list[Part]) -> Delta:
        """Where the answer is read, one token after the other: each is of the thinking or is not, and none is looked at
        behind the one call that may be."""
        if self._reader is None:
            return self._detokenizer.push(token_ids)
        for used, token in enumerate(token_ids, 1):
            text, stopped, _ = self._detokenizer.push([token])
            self._take(self._reader, text, parts)
            if stopped is not None or self._is_enough(parts):
                return Delta("", stopped, used)
        return Delta("", None, len(token_ids))

    def _take(self, reader: AnswerReader, text: str, parts: list[Part]) -> None:
        """The text of one more token."""
        part = reader.pass_by(text)
        if part is not None:
            parts.append(part)
            self.num_reasoning_tokens += reader.thinking
            return
        thinks = reader.thinking
        parts += reader.push(text)
        self.num_reasoning_tokens += thinks or reader.thinking

    def _is_enough(self, parts: list[Part]) -> bool:
        return self._one_call and any(isinstance(part, CallEnded) for part in parts)

    def _told(self, parts: list[Part]) -> list[Part]:
        """`parts` as far as they go: where one call is allowed, to the end of the first."""
        if self._is_enough(parts):
            parts = parts[: next(i for i, part in enumerate(parts, 1) if isinstance(part, CallEnded))]
            self.finish = "stop"
            self.stream.abort()
        self.num_calls += sum(isinstance(part, CallEnded) for part in parts)
        if self.finish == "stop" and self.num_calls:
            self.finish = "tool_calls"
        return parts if self._tells_thinking else [part for part in parts if not isinstance(part, Thought)]

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
    """All choices of one HTTP request; prompts x `order.params.n` of them, in this order."""

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
                for number in range(order.params.n):
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
        cache = cache_usage(list(reports.values())[::-1], self._table, [choice.memory for choice in self.choices])
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
                added = choice.feed_tokens(token_ids)
                if isinstance(added, str):
                    if added:
                        self._sink.text(choice, added)
                else:
                    self._sink.piece(choice, added)
                    generation.handed_over()
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
