"""Asks engines questions, in every company, and compares what they say with what was said alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from forebay.base.errors import from_code
from forebay.config.engine_config import EngineConfig
from forebay.engine.async_engine import AsyncEngine
from forebay.engine.launch import launch
from forebay.engine.stream import Stream
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import FinishReason
from forebay.verify.questions import Question

WELL_UNDER_WAY: Final = 3  # tokens: whoever has so many decodes


@dataclass(slots=True)
class Answer:
    """What became of a question: its tokens, and what the model said of each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Of question `number` token `place` is `found` (None: there is none), and alone it was `expected`. `gap` is by how
    much that one was likelier there, in nats; None where the other was not among the likeliest."""

    number: int
    place: int
    expected: int | None
    found: int | None
    gap: float | None


@dataclass(slots=True)
class Findings:
    """What comparing has found so far."""

    num_answers: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    largest_logprob_gap: float = 0.0

    def compare(self, number: int, alone: Answer, found: Answer) -> None:
        """An answer that was given up need only be the beginning of the other."""
        self.num_answers += 1
        self.num_tokens += len(found.tokens)
        expected = alone.tokens[: len(found.tokens)] if found.finish is FinishReason.ABORT else alone.tokens
        if found.tokens != expected:
            place = next(i for i in range(len(expected) + 1) if found.tokens[i : i + 1] != expected[i : i + 1])
            self.differences.append(_difference(number, place, alone, found))
            return
        for ours, theirs in zip(found.logprobs, alone.logprobs, strict=False):
            pairs = zip((ours.logprob, *ours.top_logprobs), (theirs.logprob, *theirs.top_logprobs), strict=True)
            self.largest_logprob_gap = max(self.largest_logprob_gap, *(abs(a - b) for a, b in pairs))


def _difference(number: int, place: int, alone: Answer, found: Answer) -> Difference:
    expected, other = (next(iter(tokens[place : place + 1]), None) for tokens in (alone.tokens, found.tokens))
    gap = None
    if expected is not None and other is not None:
        said = alone.logprobs[place]
        others = dict(zip(said.top_ids, said.top_logprobs, strict=True))
        gap = said.logprob - others[other] if other in others else None
    return Difference(number, place, expected, other, gap)


class Engines:
    """One engine, or a prefill and a decode engine, that are asked `questions`. With `alone`, the answers that each got
    by itself, what they say is compared; `findings` has what was found, `answers` the last ones by question. `config`
    is that of the engine which decodes."""

    def __init__(
        self,
        config: EngineConfig,
        engine: AsyncEngine,
        prefill: AsyncEngine | None,
        questions: Sequence[Question],
        alone: Sequence[Answer],
    ) -> None:
        self.config, self.engine, self.prefill, self.questions, self.alone = config, engine, prefill, questions, alone
        self.findings = Findings()
        self.answers: dict[int, Answer] = {}
        self.most_at_once = self.num_interrupted = 0
        self.half_decode = asyncio.Event()  # or the first has ended
        self._decoding: set[int] = set()
        self._rooms = 0

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def numbers(self) -> range:
        return range(len(self.questions))

    async def counters(self) -> Counter[str]:
        """What the engine has counted since it started; of two, both together."""
        counted: Counter[str] = Counter()
        for engine in (self.engine, self.prefill):
            counted.update((await engine.state()).counters if engine else {})
        return counted

    async def ask(
        self, number: int, *, give_up_after: int | None = None, under_way: asyncio.Event | None = None
    ) -> None:
        """Ask one question, and give it up when it has `give_up_after` tokens. `under_way` is set once it decodes, or
        has ended."""
        question, answer = self.questions[number], Answer()
        async with AsyncExitStack() as stack:
            stream = await self._submit(question, stack)
            try:
                async for update in stream:
                    if update.failure is not None:
                        raise from_code(update.failure.kind, update.failure.message, update.failure.code)
                    answer.tokens += update.token_ids
                    answer.logprobs += update.logprobs or []
                    answer.finish = update.finish
                    self._decoding.add(stream.request_id)
                    self.most_at_once = max(self.most_at_once, self.num_decoding)
                    if 2 * self.num_decoding >= len(self.questions):
                        self.half_decode.set()
                    if under_way and len(answer.tokens) >= WELL_UNDER_WAY:
                        under_way.set()
                    if give_up_after is not None and len(answer.tokens) >= give_up_after:
                        stream.abort()
            finally:
                self._decoding.discard(stream.request_id)
                self.half_decode.set()
                if under_way:
                    under_way.set()
        self.answers[number] = answer
        if self.alone:
            self.findings.compare(number, self.alone[number], answer)

    async def _submit(self, question: Question, stack: AsyncExitStack) -> Stream:
        where = None
        if self.prefill is not None:
            self._rooms += 1
            where = Rendezvous("127.0.0.1", self.prefill.info.bootstrap_port, self._rooms)
            half = self.prefill.submit(prompt_token_ids=question.prompt, params=question.params, rendezvous=where)
            await stack.enter_async_context(half)
        whole = self.engine.submit(prompt_token_ids=question.prompt, params=question.params, rendezvous=where)
        return await stack.enter_async_context(whole)

    async def ask_one_by_one(self, *, backwards: bool = False) -> None:
        for number in reversed(self.numbers) if backwards else self.numbers:
            await self.ask(number)

    async def ask_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in self.numbers:
                group.create_task(self.ask(number))

    async def ask_as_they_come(self, *, some_give_up: bool = False) -> None:
        """Each is asked when the one before it decodes; every third gives up after as many tokens as it has come
        places before it."""
        async with asyncio.TaskGroup() as group:
            for number in self.numbers:
                under_way = asyncio.Event()
                tokens = number + 1 if some_give_up and number % 3 == 0 else None
                group.create_task(self.ask(number, give_up_after=tokens, under_way=under_way))
                await under_way.wait()


@asynccontextmanager
async def started(
    configs: Sequence[EngineConfig], questions: Sequence[Question], alone: Sequence[Answer] = ()
) -> AsyncIterator[Engines]:
    """One engine process, or a decode engine and behind it a prefill engine, ready to be asked. Raises the typed error
    of one that cannot start."""
    async with AsyncExitStack() as stack:
        engines = []
        for config in configs:
            engine = await AsyncEngine.connect(launch(config))
            stack.push_async_callback(engine.close, drain_s=0.0)
            engines.append(engine)
            await engine.ready()
        yield Engines(configs[0], engines[0], engines[1] if len(engines) > 1 else None, questions, alone)
