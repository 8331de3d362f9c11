"""Questions asked in one circumstance, and what their answers are compared with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.verify.remote.questions import Question, filler, sibling
from forebay.verify.remote.replies import Difference, Reply, first_difference, largest_logprob_gap
from forebay.verify.remote.server import COLD, Options, Server

_FILLER_TOKENS: Final = (40, 200, 90, 600, 20, 330)  # of the prompts beside the compared ones
_LONG_TOKENS: Final = 2000  # of the prompts that arrive while an answer is generated
_EVENTS_BEFORE_ABORT: Final = 3


@dataclass(slots=True)
class Findings:
    """Answers compared, and where they differ. `num_logprobs` are the tokens whose log-probabilities were compared.
    `cached_tokens` is the sum of those that the server reports, None if it reports none. `most_beside` is the largest
    number of other requests in flight with a compared one. `num_salted` of the differences are gone with the salt that
    the request had alone."""

    num_answers: int = 0
    differences: list[Difference] = field(default_factory=list)
    num_logprobs: int = 0
    largest_logprob_gap: float = 0.0
    cached_tokens: int | None = None
    most_beside: int = 0
    num_salted: int = 0
    num_aborted: int = 0
    num_arrived: int = 0


@dataclass(frozen=True, slots=True)
class Alone:
    """A question with the answer that it had alone, with this salt where the server has salts."""

    question: Question
    reply: Reply
    salt: str


class Session:
    """The questions of one circumstance, asked of `server`. `rng` makes the prompts of the load beside them."""

    def __init__(self, server: Server, alone: Sequence[Alone], max_tokens: int, rng: random.Random) -> None:
        self.server, self.alone, self.rng, self._max_tokens = server, alone, rng, max_tokens
        self.findings = Findings()
        self._in_flight = 0

    async def compare(self, one: Alone, options: Options = COLD) -> Reply:
        """Ask a question again, and note whether its answer is the one that it had alone."""
        with self._counted():
            before = self._in_flight
            reply = await self.server.ask(one.question.fields, self._max_tokens, options)
            others = max(before, self._in_flight) - 1
        self.findings.most_beside = max(self.findings.most_beside, others)
        self._note(one, reply)
        return reply

    def _note(self, one: Alone, reply: Reply) -> None:
        findings = self.findings
        findings.num_answers += 1
        findings.num_logprobs += min(len(one.reply.tokens), len(reply.tokens))
        findings.largest_logprob_gap = max(findings.largest_logprob_gap, largest_logprob_gap(one.reply, reply))
        if reply.cached_tokens is not None:
            findings.cached_tokens = (findings.cached_tokens or 0) + reply.cached_tokens
        if found := first_difference(one.reply, reply):
            texts = one.reply.page_text, reply.page_text
            num_tokens = one.reply.prompt_tokens or one.question.num_tokens
            number, way = one.question.number, one.question.way
            findings.differences.append(Difference(number, way, num_tokens, *found, texts))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def one_by_one(self, options: Options = COLD, *, backwards: bool = False) -> None:
        """Compare each question alone."""
        for one in reversed(self.alone) if backwards else self.alone:
            await self.compare(one, options)

    async def repeated(self) -> None:
        """Compare each question alone; ask those that differ once more with the salt that they had."""
        await self.one_by_one(backwards=True)
        different = {difference.question for difference in self.findings.differences}
        for one in self.alone:
            if self.server.has_salts and one.question.number in different:
                again = await self.server.ask(one.question.fields, self._max_tokens, Options(salt=one.salt))
                self.findings.num_salted += first_difference(one.reply, again) is None

    async def beside(self, num_others: int) -> None:
        """Compare each question while `num_others` requests, questions or load, are in flight with it."""
        places = asyncio.Semaphore(num_others + 1)
        async with asyncio.TaskGroup() as group:
            compared = [group.create_task(self._in_place(places, one)) for one in self.alone]
            load = [group.create_task(self._load(places)) for _ in range(num_others)]
            await asyncio.wait(compared)
            for task in load:
                task.cancel()

    async def _in_place(self, places: asyncio.Semaphore, one: Alone) -> None:
        async with places:
            await self.compare(one)

    async def _load(self, places: asyncio.Semaphore) -> None:
        """Keep one more request in flight, until cancelled."""
        while True:
            async with places:
                await self.fill(self.rng.choice(_FILLER_TOKENS))

    async def fill(self, num_tokens: int, max_tokens: int | None = None) -> None:
        """Send a request whose answer is not compared."""
        fields = filler(self.rng, num_tokens, self.alone[0].question)
        with self._counted():
            await self.server.ask(fields, max_tokens or self._max_tokens, Options(logprobs=False))

    async def with_arrivals(self) -> None:
        """Compare each question while long prompts arrive, one after another from its first token on."""
        for one in self.alone:
            async with asyncio.TaskGroup() as group:
                started = asyncio.Event()
                arrivals = group.create_task(self._arrive(started))
                await self.compare(one, Options(stream=True, on_event=started.set))
                arrivals.cancel()

    async def _arrive(self, started: asyncio.Event) -> None:
        await started.wait()
        while True:
            self.findings.num_arrived += 1
            await self.fill(_LONG_TOKENS, max_tokens=1)

    async def after_aborts(self) -> None:
        """Compare each question after a client left in the middle of the same one."""
        options = Options(stream=True, stop_after=_EVENTS_BEFORE_ABORT, cold=False)
        for one in self.alone:
            cut = await self.server.ask(one.question.fields, self._max_tokens, options)
            self.findings.num_aborted += not cut.finish
            await self.compare(one, Options(cold=False))

    async def after_siblings(self) -> None:
        """Compare each question after a request whose prompt begins alike and continues differently."""
        for one in self.alone:
            await self.server.ask(sibling(one.question, self.rng), 1, Options(cold=False, logprobs=False))
            await self.compare(one, Options(cold=False))

    async def twice_warm(self) -> None:
        """Compare each question from the server's prefix cache."""
        options = Options(cold=False)
        for one in self.alone:
            await self.server.ask(one.question.fields, 1, replace(options, logprobs=False))
            await self.compare(one, options)
