"""One HTTP request's generations: submitted, detokenized, ended, counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.client.choice import Choice, Piece, Prompt
from forebay.engine.stream import Stream
from forebay.memory.retention import NotKept
from forebay.requests.sampling_params import RANDOM_SEED, Grammar, SamplingParams, seed_of_choice
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import CacheReport, MemoryReport, Update
from forebay.server.api.core.receipts import Receipt
from forebay.text.token_bytes import TokenBytes


class CacheUsage(msgspec.Struct, kw_only=True):
    """The effect of the prefix cache on the request; `matched_tokens` by kind of cache, `kv` first. `tiers` counts
    the cached tokens by where they were: on the `device`, or in another tier. After `retractions`
    `recomputed_tokens` were computed again. `checkpoints` are the lengths of prompt and answer, in tokens, after which
    a state is kept: a later request of a model with states can resume there.

    The first `kept_tokens` of the prompt are kept until `kept_until`, a Unix time, unless memory is wanted; null if
    nothing is. `not_kept` says why not all that was asked for is kept, null if it is."""

    cached_tokens: int
    miss_reason: str
    matched_tokens: dict[str, int]
    tiers: dict[str, int]
    differs: dict[str, Any] | None
    retractions: int
    recomputed_tokens: int
    checkpoints: list[int]
    kept_tokens: int
    kept_until: int | None
    not_kept: str | None


class CachedDetails(msgspec.Struct, kw_only=True):
    """The number of prompt tokens whose KV was reused, and of these the tokens of images if the prompt has images."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class ReasoningDetails(msgspec.Struct, kw_only=True):
    """The completion tokens that were thinking."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """The token counts of an answer, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: ReasoningDetails | UnsetType = UNSET
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    receipt: Receipt | UnsetType = UNSET
    cache: CacheUsage


class Sink(Protocol):
    """Takes what becomes of a request's choices, in the turn of the event loop in which it does."""

    def text(self, choice: Choice, text: str) -> None:
        """A piece that is text and nothing else: the most common one by far."""

    def piece(self, choice: Choice, piece: Piece) -> None:
        """Take in a piece of the choice: text, parts and scored tokens that belong together."""

    def restart(self, choice: Choice) -> None:
        """Discard the text of this choice. Raises the error for the client if some of it has been sent."""
        ...


class Generation:
    """All choices of one HTTP request; prompts x `order.params.n` of them, in this order."""

    def __init__(self, choices: list[Choice], num_prompt_tokens: int, table: TokenBytes, order: Order) -> None:
        self.choices = choices
        self.streams: list[Stream] = []  # of each
        self.num_prompt_tokens = num_prompt_tokens
        self.started_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.disconnected = False
        self.error: Exception | None = None
        self.over = False  # all choices have finished, or one has failed
        self.adapter = order.adapter  # the LoRA adapter that is applied
        self.why_differs: Callable[[int], str] | None = (
            None  # the reason for a position at which the prompt left another
        )
        self._table, self._order = table, order
        self._has_pieces = False
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that a choice may have."""
        return self._order.params.max_tokens

    @classmethod
    def submit(cls, engine: AsyncEngine, table: TokenBytes, prompts: list[Prompt], order: Order) -> Generation:
        """Submit all requests or none: if one is refused, the earlier ones are aborted. Raises the engine's error."""
        choices: list[Choice] = []
        peers = iter(order.peers or repeat(None))
        together = len(prompts) * order.params.n > 1  # then one load of the adapter answers, alone the newest
        generation = cls(choices, sum(len(prompt.token_ids) for prompt in prompts), table, order)
        try:
            for prompt in prompts:
                pictures, prompt = prompt.pictures, replace(prompt, pictures=())  # choices outlive their need
                for number in range(order.params.n):
                    stream = engine.submit(
                        prompt_token_ids=prompt.token_ids,
                        params=order.params_of(number, prompt.grammar),
                        priority=order.priority,
                        namespace=order.namespace,
                        author=order.author,
                        tenant=order.tenant,
                        resume_points=prompt.resume_points,
                        retentions=prompt.retentions,
                        rendezvous=next(peers),
                        adapter=order.adapter,
                        adapter_number=order.adapter_number if together else 0,
                        pictures=pictures,
                    )
                    generation.streams.append(stream)
                    choices.append(
                        Choice(
                            len(choices),
                            prompt,
                            stream,
                            order.params,
                            table,
                            discard=order.discard_output,
                            keep_token_ids=order.keep_token_ids,
                        )
                    )
        except BaseException:
            generation.abort()
            raise
        return generation

    def abort(self) -> None:
        """End all choices; each stream then ends with the finish reason `abort`."""
        for choice in self.choices:
            choice.stream.abort()

    def disconnect(self) -> None:
        """Note that the client is gone, and end all choices."""
        self.disconnected = True
        self.abort()

    def deliver(self, sink: Sink) -> None:
        """From now on, give `sink` every choice's pieces as they come, until all have finished. The first failure ends
        all of them."""
        for choice, stream in zip(self.choices, self.streams, strict=True):
            stream.deliver(_Feed(self, choice, sink))

    async def begun(self) -> None:
        """Wait for the first piece, or for the end. Raises the error of a generation that ended without a piece."""
        await self._begun.wait()
        if self.error is not None and not self._has_pieces:
            raise self.error

    async def ended(self) -> None:
        """Wait for the end of all choices. Raises the first failure."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    def saw_token(self) -> None:
        """Note the time of a token, for the time to first token and the time between tokens."""
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
        """End the generation with an error, which `ended` raises."""
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

    def usage(self) -> Usage:
        """OpenAI's usage, with what the prefix cache did. Choices of one prompt count it once."""
        completion = sum(choice.num_tokens for choice in self.choices)
        reports = {id(choice.prompt): choice.cache for choice in reversed(self.choices)}
        order, memories = self._order, [choice.memory for choice in self.choices]
        cache = cache_usage(list(reports.values())[::-1], self._table, memories, self.why_differs)
        num_images = sum({id(choice.prompt): choice.prompt.num_image_tokens for choice in self.choices}.values())
        is_read = any(choice.prompt.reading is not None for choice in self.choices)
        reasoning = ReasoningDetails(reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices))
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.num_prompt_tokens + completion,
            prompt_tokens_details=CachedDetails(cached_tokens=cache.cached_tokens, image_tokens=num_images or UNSET),
            completion_tokens_details=reasoning if is_read else UNSET,
            weight_version=max(choice.weight_version for choice in self.choices),
            adapter=self.adapter or UNSET,
            receipt=UNSET if order.receipt is None else order.receipt(order, self.choices[0]),
            cache=cache,
        )


@dataclass(slots=True)
class _Feed:
    """A choice's `Receiver`: its updates become pieces at once."""

    _generation: Generation
    _choice: Choice
    _sink: Sink

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How every choice of a request is made: `params.n` of each prompt, with seeds of their own."""

    params: SamplingParams
    namespace: str
    author: str  # whose prompts the answer may tell of
    tenant: str = ""  # whose share of the engine it uses
    priority: int = 0
    adapter: str = ""  # the LoRA adapter to apply, and the number of its load
    adapter_number: int = 0
    peers: Sequence[Rendezvous | None] = ()  # in a role: where the other half of each prompt's choices is
    seed: int = RANDOM_SEED
    keep_token_ids: bool = False  # the answer has those of its output
    discard_output: bool = False  # only the prompt's log-probabilities are wanted
    receipt: Callable[[Order, Choice], Receipt] | None = None  # makes that of the only choice, if it is wanted

    def params_of(self, number: int, grammar: Grammar | None = None) -> SamplingParams:
        """Choice `number` of a prompt: the user's seed, or one derived from it, so that choices differ and repeat. A
        prompt's own grammar comes before that of all."""
        grammar = grammar or self.params.grammar
        return msgspec.structs.replace(self.params.of_tokens(), seed=seed_of_choice(self.seed, number), grammar=grammar)


NOTHING_ASKED: Final = MemoryReport(not_kept=NotKept.NOT_ASKED)


def cache_usage(
    reports: Sequence[CacheReport],
    table: TokenBytes,
    memories: Sequence[MemoryReport] = (NOTHING_ASKED,),
    why_differs: Callable[[int], str] | None = None,
) -> CacheUsage:
    """Sum up the reports of a request's prompts, one each: tokens are summed, the reason and the difference are the
    first's. Of its choices, described by `memories`, retractions are summed; checkpoints, and what is kept, are the
    first's.

    `matched_tokens` are the tokens whose KV was cached, and for each other kind of cache the last position within them
    from which it could resume; `cached_tokens` were used. `differs` describes the first difference from a cached prompt
    of the same session: the position, the text of the token in each of the two, and the reason by `why_differs`. It is
    null if the prompt differs from none.
    """
    first, cached_tokens = reports[0], sum(report.cached_tokens for report in reports)
    behind = sum((Counter(report.tiers) for report in reports), Counter[str]())  # the device
    return CacheUsage(
        cached_tokens=cached_tokens,
        miss_reason=first.miss_reason.value,
        matched_tokens={
            "kv": sum(report.kv_tokens for report in reports),
            **{kind: sum(report.resumable.get(kind, 0) for report in reports) for kind in first.resumable},
        },
        tiers={"device": cached_tokens - behind.total(), **behind},
        differs=_difference(first, table, why_differs) if first.differs_at >= 0 else None,
        retractions=sum(memory.retractions for memory in memories),
        recomputed_tokens=sum(memory.recomputed_tokens for memory in memories),
        checkpoints=memories[0].checkpoints,
        kept_tokens=memories[0].kept_tokens,
        kept_until=int(time.time() + memories[0].kept_s) if memories[0].kept_tokens else None,
        not_kept=memories[0].not_kept or None,
    )


def _difference(report: CacheReport, table: TokenBytes, why: Callable[[int], str] | None) -> dict[str, Any]:
    here, there = (table.spelled(token).decode("utf-8", "replace") for token in (report.token_here, report.token_there))
    reason = {} if why is None else {"reason": why(report.differs_at)}
    return {"position": report.differs_at, "here": here, "there": there, **reason}


class Timings(NamedTuple):
    """Seconds. `prompt_s` lasts from the request's arrival to its first token and contains its wait, `decode_s` from
    there to its last token."""

    total_s: float
    prompt_s: float
    decode_s: float

    @classmethod
    def of(cls, generation: Generation) -> Timings:
        """Measure a generation that has just ended. Without any token, the time to first token is the whole time."""
        now, begin = time.monotonic(), generation.started_at
        first = now if generation.first_token_at is None else generation.first_token_at
        last = first if generation.last_token_at is None else generation.last_token_at
        return cls(now - begin, first - begin, last - first)
