"""Asks engines questions under load, and compares the answers with those to questions asked one at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from forebay.base.errors import EngineError, Unavailable
from forebay.config.engine_config import EngineConfig, Exact
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.frames import SaveCache
from forebay.engine.lifecycle.launch import launch
from forebay.engine.stream import Stream
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import CacheReport, FinishReason, History, MemoryReport, SpeculationReport, Update
from forebay.verify.questions import Question

NONE: Final[Mapping[str, Path]] = MappingProxyType({})
TORCH: Final = "torch"  # the kernels whose rounding depends on a batch
_HOT: Final = 100.0  # a temperature at which all tokens are about as likely
_SURPRISE: Final = 20.0  # nats: the least improbable of two equal draws that are no chance
_CLOSE: Final = 0.05  # of the vocabulary. The chance that _MANY draws are all within it is 4e-10.
_MANY: Final = 9
WELL_UNDER_WAY: Final = 3  # tokens: whoever has so many decodes
_AT_A_TIME: Final = 3  # questions of a wave
_SHORT_TOKENS: Final = 2  # of each answer that is given up before a wave


@dataclass(slots=True)
class Answer:
    """The answer to a question: its tokens, their log-probabilities, and the engine's state around it.

    `cache`, `memory` and `history` are the engine's reports on it, and `speculation` if it drafts tokens. `concurrency`
    is the most answers that decoded at the same time, itself included; `num_partly_accepted` the number of its drafts
    of which a token was accepted and a later one rejected; `interrupted` whether all memory was released while it
    decoded; `restarted` whether it began again because the weights changed, whose version `weights` is the last.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    cache: CacheReport = field(default_factory=CacheReport)
    memory: MemoryReport = field(default_factory=MemoryReport)
    history: History = field(default_factory=History)
    speculation: SpeculationReport | None = None
    concurrency: int = 0
    num_partly_accepted: int = 0
    interrupted: bool = False
    restarted: bool = False
    weights: int = 0

    def take(self, update: Update) -> None:
        """Add the tokens of an update, and keep its reports. One that has restarted drops the tokens so far."""
        if update.restarted:
            self.restarted, self.tokens, self.logprobs = True, [], []
        if update.cache is not None:
            self.weights = update.weight_version
        self.tokens += update.token_ids
        self.logprobs += update.logprobs or []
        self.finish = update.finish
        self.cache = update.cache or self.cache
        self.memory = update.memory or self.memory
        self.history, self.speculation = update.history or self.history, update.speculation
        self.num_partly_accepted = update.num_partly_accepted


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that differs: of prompt `number` (of `prompt_len` tokens, asked in this `way` of `adapter`, "" for the
    model) token `place` is `found` (None: there is none), and alone it was `expected`. `gap` is by how much that one
    was likelier there, in nats; None if the other was not among the likeliest."""

    number: int
    prompt_len: int
    way: str
    adapter: str
    place: int
    expected: int | None
    found: int | None
    gap: float | None


@dataclass(slots=True)
class Findings:
    """Results of the comparison so far. With `exact`, log-probabilities of equal tokens must be equal to the bit."""

    exact: bool = False
    num_answers: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    largest_logprob_gap: float = 0.0

    @property
    def differ(self) -> bool:
        return bool(self.differences) or (self.exact and self.largest_logprob_gap > 0.0)

    def compare(self, question: Question, alone: Answer, found: Answer) -> None:
        """An answer that was given up need only be the beginning of the other."""
        self.num_answers += 1
        self.num_tokens += len(found.tokens)
        expected = alone.tokens[: len(found.tokens)] if found.finish is FinishReason.ABORT else alone.tokens
        if found.tokens != expected:
            place = next(i for i in range(len(expected) + 1) if found.tokens[i : i + 1] != expected[i : i + 1])
            self.differences.append(_difference(question, place, alone, found))
            return
        for ours, theirs in zip(found.logprobs, alone.logprobs, strict=False):
            pairs = zip((ours.logprob, *ours.top_logprobs), (theirs.logprob, *theirs.top_logprobs), strict=True)
            self.largest_logprob_gap = max(self.largest_logprob_gap, *(abs(a - b) for a, b in pairs))


def _difference(question: Question, place: int, alone: Answer, found: Answer) -> Difference:
    expected, other = (next(iter(tokens[place : place + 1]), None) for tokens in (alone.tokens, found.tokens))
    gap = None
    if expected is not None and other is not None:
        said = alone.logprobs[place]
        others = dict(zip(said.top_ids, said.top_logprobs, strict=True))
        gap = said.logprob - others[other] if other in others else None
    prompt = question.number, len(question.prompt), question.way, question.adapter
    return Difference(*prompt, place, expected, other, gap)


class Engines:
    """One engine, or a prefill and a decode engine, that answer `questions`. With `alone`, the answers that each
    question got by itself, their answers are compared. `findings` has the differences, `answers` the last ones by
    question, `all` of them with their question's number. `config` is that of the engine which decodes. Questions are
    asked in `order`. `adapters` are the folders of those that questions name."""

    def __init__(
        self,
        config: EngineConfig,
        engine: AsyncEngine,
        prefill: AsyncEngine | None,
        questions: Sequence[Question],
        alone: Sequence[Answer],
        adapters: Mapping[str, Path],
    ) -> None:
        self.config, self.engine, self.prefill, self.questions, self.alone = config, engine, prefill, questions, alone
        self.findings = Findings(exact=config.exact is Exact.ON and config.kernels != TORCH)
        self.answers: dict[int, Answer] = {}
        self.all: list[tuple[int, Answer]] = []
        self.most_at_once = 0
        self.half_decode = asyncio.Event()  # or the first has ended
        self.order = list(range(len(questions)))
        self.num_loads = 0  # of adapters under names that had another
        self.other_versions: set[int] = set()  # of weights that are not those of `alone`
        self._adapters = {name: (name, path) for name, path in adapters.items()}  # the name that each has now
        self._decoding: dict[int, Answer] = {}  # by the request's id
        self._rooms = 0
        self._limit, self._silence_s = asyncio.timeout(None), 0.0

    @property
    def num_interrupted(self) -> int:
        return sum(answer.interrupted for _, answer in self.all)

    @asynccontextmanager
    async def limited(self, silence_s: float) -> AsyncIterator[None]:
        """Raise Unavailable if no request gets a token for `silence_s` seconds inside the block."""
        self._limit, self._silence_s = asyncio.timeout(silence_s), silence_s
        try:
            async with self._limit:
                yield
        except TimeoutError:
            raise Unavailable(f"no request got a token for {silence_s:.0f} s: the engine hangs") from None
        finally:
            self._limit = asyncio.timeout(None)

    def rotate(self) -> None:
        """Ask the questions in another order from now on: the last question is the first to be retracted. Each question
        is the first of one of as many orders as there are questions."""
        step = next(step for step in count(max(1, len(self.order) // 3)) if gcd(step, len(self.order)) == 1)
        self.order = self.order[step:] + self.order[:step]
        self.half_decode.clear()

    def interrupt(self) -> None:
        """Note that memory was released in the middle of those that decode."""
        for answer in self._decoding.values():
            answer.interrupted = True

    def ways_without(self, touched: Callable[[Engines, Question, Answer], bool]) -> list[str]:
        """Return the ways of choosing tokens of which no answer was `touched`, but for those of derived questions."""
        found = {
            self.questions[number].way for number, answer in self.all if touched(self, self.questions[number], answer)
        }
        return sorted({question.way for question in self.questions if not question.is_derived} - found)

    async def counters(self) -> Counter[str]:
        """Return the engine's counters since its start; of two engines, their sums."""
        counted: Counter[str] = Counter()
        for engine in (self.engine, self.prefill):
            counted.update((await engine.state()).counters if engine else {})
        return counted

    def _reschedule(self, silence_s: float | None) -> None:
        """Allow so many seconds from now without a token, None for any number."""
        if not self._limit.expired():
            self._limit.reschedule(None if silence_s is None else asyncio.get_running_loop().time() + silence_s)

    def _note_decoding(self, request_id: int, answer: Answer) -> None:
        """Count a request among those that decode, and update the concurrency of each."""
        self._decoding[request_id] = answer
        if self._limit.when() is not None:
            self._reschedule(self._silence_s)
        num_decoding = len(self._decoding)
        self.most_at_once = max(self.most_at_once, num_decoding)
        for other in self._decoding.values():
            other.concurrency = max(other.concurrency, num_decoding)
        if 2 * num_decoding >= len(self.questions):
            self.half_decode.set()

    async def ask(
        self, number: int, *, give_up_after: int | None = None, under_way: asyncio.Event | None = None
    ) -> None:
        """Ask one question, and give it up when it has `give_up_after` tokens. `under_way` is set once it decodes, or
        has ended."""
        question = self.questions[number]
        answer = await self._answer(question, give_up_after, under_way)
        self.answers[number] = answer
        self.all.append((number, answer))
        if self.alone and answer.weights not in self.other_versions:
            self.findings.compare(question, self.alone[number], answer)

    async def _answer(
        self, question: Question, give_up_after: int | None = None, under_way: asyncio.Event | None = None
    ) -> Answer:
        answer = Answer()
        async with AsyncExitStack() as stack:
            stream = await self._submit(question, stack)
            try:
                async for update in stream:
                    if update.failure is not None:
                        raise update.failure.error
                    answer.take(update)
                    self._note_decoding(stream.request_id, answer)
                    if under_way and len(answer.tokens) >= WELL_UNDER_WAY:
                        under_way.set()
                    if give_up_after is not None and len(answer.tokens) >= give_up_after:
                        stream.abort()
            finally:
                self._decoding.pop(stream.request_id, None)
                self.half_decode.set()
                if under_way:
                    under_way.set()
        return answer

    async def check_draws(self) -> None:
        """Draw two answers with different seeds at a high temperature.

        Raise EngineError if they are equal, or if the tokens at all places are close to each other: draws go through
        the vocabulary in its order, so that one random number draws nearly the same token at each place."""
        first = self.questions[0]
        drawn = []
        for seed in (1, 2):
            params = msgspec.structs.replace(first.params, temperature=_HOT, seed=seed)
            drawn.append(await self._answer(first._replace(params=params)))
        if all(-sum(entry.logprob for entry in answer.logprobs) > _SURPRISE for answer in drawn):
            one, other = drawn
            if one.tokens == other.tokens:
                raise EngineError("seeds 1 and 2 draw the same tokens: draws do not depend on the seed")
            close = _CLOSE * self.engine.info.vocab_size
            if any(len(one.tokens) >= _MANY and max(one.tokens) - min(one.tokens) < close for one in drawn):
                raise EngineError("nearly one token is drawn at all places: draws do not depend on the position")

    async def load_anew(self) -> None:
        """Load each adapter under the name of the next one, in its place: questions name it so from then on."""
        names = [name for name, _ in self._adapters.values()]
        for number, (adapter, (_, path)) in enumerate([*self._adapters.items()]):
            name = names[(number + 1) % len(names)]
            for engine in (self.engine, self.prefill):
                if engine is not None:
                    await engine.load_adapter(name, str(path), replace=True)
            self._adapters[adapter] = name, path
            self.num_loads += 1

    async def load_weights(self, path: Path | str, *, are_others: bool) -> None:
        """Load the weights at `path`; `are_others` if they are not those of `alone`. Requests that run begin again. The
        time that it takes does not count as that of an engine that hangs."""
        self._reschedule(None)
        state = await self.engine.update_weights(str(path), mode="retract")
        self._reschedule(self._silence_s)
        if are_others:
            self.other_versions.add(state.memory.weight_version)

    async def save_cache(self) -> None:
        """Ask each question once, and return when the prefix cache is in its files."""
        await self.ask_as_they_come()
        await self.engine.link.ask(SaveCache)

    async def _submit(self, question: Question, stack: AsyncExitStack) -> Stream:
        name = self._adapters[question.adapter][0] if question.adapter else ""
        where = None
        if self.prefill is not None:
            self._rooms += 1
            where = Rendezvous("127.0.0.1", self.prefill.info.bootstrap_port, self._rooms)
            await stack.enter_async_context(_submitted(self.prefill, question, name, where))
        return await stack.enter_async_context(_submitted(self.engine, question, name, where))

    async def ask_one_by_one(self, *, backwards: bool = False) -> None:
        """Run the questions in sequence, each after the previous answer."""
        for number in reversed(self.order) if backwards else self.order:
            await self.ask(number)

    async def ask_all(self, *ways: str) -> None:
        """Run all questions concurrently, or those of some ways alone; the first failure cancels the others."""
        async with asyncio.TaskGroup() as group:
            for number in self.order:
                if not ways or self.questions[number].way in ways:
                    group.create_task(self.ask(number))

    async def ask_beside_the_longest(self) -> None:
        """Ask one question of each way of choosing tokens after another, each right behind that with the longest
        prompt: if there is no room for both answers, the longest keeps its memory."""
        first = {question.way: number for number, question in reversed([*enumerate(self.questions)])}
        lengths = [0 if question.is_derived else len(question.prompt) for question in self.questions]
        longest = lengths.index(max(lengths))
        for number in sorted(first.values()):
            async with asyncio.TaskGroup() as group:
                group.create_task(self.ask(longest))
                group.create_task(self.ask(number))

    async def ask_in_waves(self) -> None:
        """Ask three questions at a time, and the next three once these decode. Before each three, ask the shortest
        prompt more than twice as often, and give it up after two tokens.

        Slots that were freed last are taken first. So three requests take the rows of the last three that were given
        up, and pages of more of them. If a step does not reset its padded rows, they name the other rows, and the step
        writes to these pages. The number of requests given up alternates, because some sizes have no padded rows."""
        shortest = min(self.order, key=lambda number: len(self.questions[number].prompt))
        async with asyncio.TaskGroup() as group:
            for wave, first in enumerate(range(0, len(self.order), _AT_A_TIME)):
                async with asyncio.TaskGroup() as given_up:
                    for _ in range(2 * _AT_A_TIME + 1 + wave % 2):
                        given_up.create_task(self.ask(shortest, give_up_after=_SHORT_TOKENS))
                few = {number: asyncio.Event() for number in self.order[first : first + _AT_A_TIME]}
                for number, under_way in few.items():
                    group.create_task(self.ask(number, under_way=under_way))
                for under_way in few.values():
                    await under_way.wait()

    async def ask_as_they_come(self, *, some_give_up: bool = False) -> None:
        """Each is asked when the one before it decodes; every third gives up after as many tokens as it has come
        places before it."""
        async with asyncio.TaskGroup() as group:
            for number in self.order:
                under_way = asyncio.Event()
                tokens = number + 1 if some_give_up and number % 3 == 0 else None
                group.create_task(self.ask(number, give_up_after=tokens, under_way=under_way))
                await under_way.wait()


@asynccontextmanager
async def started(
    configs: Sequence[EngineConfig],
    questions: Sequence[Question],
    alone: Sequence[Answer] = (),
    adapters: Mapping[str, Path] = NONE,
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
        yield Engines(configs[0], engines[0], engines[1] if len(engines) > 1 else None, questions, alone, adapters)


def _submitted(engine: AsyncEngine, question: Question, adapter: str, where: Rendezvous | None) -> Stream:
    return engine.submit(
        prompt_token_ids=question.prompt,
        params=question.params,
        namespace=question.namespace,
        adapter=adapter,
        pictures=question.pictures,
        resume_points=question.resume_points,
        rendezvous=where,
    )
