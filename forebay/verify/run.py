"""The whole of it: ask alone, then in every circumstance, and say of each what came of it."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from forebay.base.errors import ConfigError, Conflict, EngineError, ForebayError, ModelError
from forebay.config.engine_config import EngineConfig, KnownAnswer
from forebay.config.flag import Value
from forebay.config.resolve import resolve
from forebay.config.speculation import PREFIX
from forebay.text.tokenizer import Tokenizer
from forebay.verify.adapters import SETTINGS, adapted, made_adapters, settings
from forebay.verify.asking import NONE, Answer, Engines, Findings, started
from forebay.verify.blame import Blame, blame
from forebay.verify.circumstances import (
    ALONE,
    FOLDER,
    PLANTED,
    Circumstance,
    Flags,
    Room,
    circumstances,
    with_adapters,
    with_pictures,
)
from forebay.verify.pictures import PICTURES, encoder_of, pictured
from forebay.verify.questions import Question, broken_rule, derived, largest, make_questions, num_derived
from forebay.verify.verdict import Verdict, first_error

CONTEXT: Final = "context_length"
TIERS: Final = "hisparse_"  # settings of the host tier and of hot buffers, for the circumstances that have them
_CLUSTER_KEY: Final = secrets.token_bytes(32)
SILENCE_S: Final = 120.0  # without a token of any request
_ALONE: Final = 10
# Counters of an engine that recovers, so that no answer shows it.
_FAILURES: Final = {
    "failed_steps": "steps failed",
    "recoveries": "times the engine started over",
    "books_cleared": "times it freed all memory",
    "leaked_pages": "pages leaked",
    "ledger_violations": "slots were used against the rules",
}
MOST_ROUNDS: Final = 8  # of asking everything; one or two are enough for most circumstances


@dataclass(slots=True)
class Outcome:
    """The result of one circumstance. `what`: how far it came about, or why it did not."""

    name: str
    verdict: Verdict
    what: str
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    num_rounds: int = 0
    blame: Blame | None = None  # of one that differs, if it has several settings


@dataclass(slots=True)
class Baseline:
    """The answers that questions got alone, and the questions `derived` of them; of questions with adapters and with
    pictures once a circumstance needs them. `kinds` are those of cache that the model has. `seconds`: wall time."""

    alone: list[Answer] = field(default_factory=list)
    derived: list[Question] = field(default_factory=list)
    derived_alone: list[Answer] = field(default_factory=list)
    adapted_alone: list[Answer] = field(default_factory=list)
    pictured_alone: list[Answer] = field(default_factory=list)
    kinds: frozenset[str] = frozenset()
    seconds: float = 0.0


class Verification:
    """A verification of the model, compute and speculation that `given` names: settings, of which circumstances decide
    others. The engine counts as hung if no request gets a token for `silence_s` seconds plus the time that all answers
    took alone; alone, for ten times `silence_s`.

    Raises ConfigError and ModelError if the settings cannot work.
    """

    def __init__(
        self, given: Mapping[str, Value], *, num: int, max_tokens: int, seed: int, silence_s: float = SILENCE_S
    ) -> None:
        guess = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        tiers = {name: value for name, value in given.items() if name.startswith(TIERS)}
        self._given = {name: value for name, value in given.items() if name not in guess and name not in tiers}
        self.config, self.max_tokens = self._resolved({}), max_tokens
        memory = self.config.memory
        self.tokenizer = Tokenizer.from_path(self.config.model_path)
        self.questions: list[Question] = make_questions(
            self.tokenizer,
            num,
            max_tokens,
            page_size=memory.page_size,
            context_length=memory.context_length,
            seed=seed,
            device=self.config.device,
            boundaries=(2 * memory.page_size, self.config.kinds.track_interval),
        )
        self._seed, self._adapted = seed, adapted(self.questions)
        self._pictured = pictured(self.questions, encoder_of(Path(self.config.model_path)), seed)
        sizes = [*self.questions, *self.questions[:1] * num_derived(self.questions)]
        room, beside = (Room(asked, memory.page_size) for asked in (self.questions, self._adapted))
        # A page table is as wide as the largest question needs, so that steps of several prompts have more tokens.
        self._roomy: list[Flags] = [
            {
                "max_total_tokens": Room(asked, memory.page_size).roomy,
                "max_running_requests": len(asked),
                CONTEXT: min(largest(asked), memory.context_length),
            }
            for asked in (sizes, self._adapted, self._pictured or sizes)
        ]
        guess, num_threads = {**PLANTED, **guess}, self.config.num_threads
        without = circumstances(room, guess, num_threads, self._in_tiers(tiers))
        pictures = with_pictures(Room(self._pictured, memory.page_size)) if self._pictured else []
        self.circumstances = [*without, *with_adapters(beside, guess), *pictures]
        self.baseline = Baseline()
        self._silence_s = silence_s

    async def ask_alone(self) -> None:
        """Run each question alone and store the answers as the baseline, then the questions made of these answers."""
        base = self.baseline
        base.alone = await self._ask_alone(self.questions, self._roomy[0], NONE)
        answers = [answer.tokens for answer in base.alone]
        base.derived = derived(self.questions, answers, self.config.memory.page_size)
        if base.derived:
            base.derived_alone = await self._ask_alone(base.derived, self._roomy[0], NONE)

    async def ask_alone_for(self, circumstance: Circumstance) -> None:
        """Run the questions of a circumstance that are of no other alone, if they have not run yet."""
        base = self.baseline
        if circumstance.pictured and not base.pictured_alone:
            asked = self._pictured[: len(self.questions)]
            base.pictured_alone = [*await self._ask_alone(asked, self._roomy[2], NONE), *base.alone]
        if circumstance.adapted and not base.adapted_alone:
            with made_adapters(self.config.model_path, self._seed) as paths:
                asked, flags = self._adapted[: len(self.questions)], {**self._roomy[1], **settings(paths)}
                found = await self._ask_alone(asked, flags, paths)
            if all(one.logprobs == of_model.logprobs for one, of_model in zip(found, base.alone, strict=True)):
                raise EngineError("adapters change no log-probability of any answer")
            base.adapted_alone = [*found, *base.alone]

    async def _ask_alone(self, questions: Sequence[Question], flags: Flags, paths: Mapping[str, Path]) -> list[Answer]:
        async with started([self._resolved(flags)], questions, adapters=paths) as engines:
            slots = engines.engine.info.slot_bytes
            kinds = [*(kind for kind, num_bytes in slots.items() if num_bytes), *([PICTURES] if self._pictured else [])]
            self.baseline.kinds = frozenset(kinds)
            began = time.monotonic()
            async with engines.limited(_ALONE * self._silence_s):
                await engines.ask_one_by_one()
            self.baseline.seconds += time.monotonic() - began
            if failures := failures_of(await engines.counters()):
                raise EngineError(f"requests that ran alone: {failures}")
            answers = [engines.answers[number] for number in range(len(questions))]
        for question, answer in zip(questions, answers, strict=True):
            if broken := broken_rule(question, answer.tokens):
                raise EngineError(f"prompt {question.number} ({question.way}), alone: {broken}")
        return answers

    async def outcome(self, circumstance: Circumstance) -> Outcome:
        """Run the questions under one circumstance; `seconds` of the result is wall time.

        If an answer differs and there are several settings, the circumstance runs again with parts of them."""
        began = time.monotonic()
        outcome = await self._outcome(circumstance, MOST_ROUNDS)
        if outcome.verdict is Verdict.DIFFERENT and len(circumstance.settings) > 1:
            differs = partial(self._differs, circumstance, outcome.num_rounds + 1)
            outcome.blame = await blame([*circumstance.settings], differs)
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _differs(self, circumstance: Circumstance, most_rounds: int, names: Sequence[str]) -> bool:
        """Return whether an answer differs with these settings alone."""
        outcome = await self.first_difference(circumstance.with_settings(names), most_rounds)
        return outcome.verdict is Verdict.DIFFERENT

    async def first_difference(self, circumstance: Circumstance, most_rounds: int = MOST_ROUNDS) -> Outcome:
        """Run the questions under one circumstance until an answer differs."""
        return await self._outcome(replace(circumstance, touched=_differed), most_rounds)

    async def _outcome(self, circumstance: Circumstance, most_rounds: int) -> Outcome:
        name, findings, num_rounds = circumstance.name, Findings(), 0
        try:
            async with self._engines(circumstance) as engines:
                findings = engines.findings
                async with engines.limited(self._most_silence_s):
                    num_rounds, missing = await _play(circumstance, engines, most_rounds)
                count = await engines.counters()
                shown, failures = circumstance.shown(engines, count), failures_of(count)
        except (ConfigError, ModelError) as error:
            return Outcome(name, Verdict.LEFT_OUT, error.message)
        except (ForebayError, ExceptionGroup) as failure:
            first = first_error(failure)
            refused = isinstance(first, Conflict) and first.code == "not_releasable"
            return Outcome(name, Verdict.LEFT_OUT if refused else Verdict.FAILED, first.message, findings)
        if findings.differ:
            gap = f"; log-probabilities of equal tokens are up to {findings.largest_logprob_gap:.2g} apart"
            what = shown if findings.differences else f"{shown}{gap}"
            return Outcome(name, Verdict.DIFFERENT, what, findings, num_rounds=num_rounds)
        if failures:
            return Outcome(name, Verdict.FAILED, f"{failures}; no answer differs", findings)
        if shown and missing:
            return Outcome(name, Verdict.NOT_SHOWN, f"{shown}; but not for: {', '.join(missing)}", findings)
        return Outcome(name, Verdict.SAME if shown else Verdict.NOT_SHOWN, shown, findings)

    @property
    def _most_silence_s(self) -> float:
        """Return the seconds without a token after which an engine counts as hung."""
        return self._silence_s + self.baseline.seconds

    @asynccontextmanager
    async def _engines(self, circumstance: Circumstance) -> AsyncIterator[Engines]:
        """The engines of a circumstance, with adapters if it has some, whose answers alone are generated once. Files of
        the prefix cache are those of an engine before, in a folder that is there meanwhile."""
        await self.ask_alone_for(circumstance)
        base, sides = self.baseline, [side for side in (circumstance.flags, circumstance.prefill_flags) if side] or [{}]
        if FOLDER in circumstance.flags:
            with TemporaryDirectory(prefix="forebay-prefixes-") as folder:
                configs = self._configs([{**sides[0], FOLDER: folder}], self._roomy[0], self.questions, base.alone)
                async with started(configs, self.questions) as engines, engines.limited(self._most_silence_s):
                    await engines.save_cache()
                async with started(configs, self.questions, base.alone) as engines:
                    yield engines
            return
        if circumstance.adapted:
            with made_adapters(self.config.model_path, self._seed) as paths:
                with_paths = {**self._roomy[1], **settings(paths)}
                configs = self._configs(sides, with_paths, self._adapted, base.adapted_alone)
                async with started(configs, self._adapted, base.adapted_alone, paths) as engines:
                    yield engines
            return
        common, questions, alone = self._roomy[0], self.questions, base.alone
        if circumstance.pictured:
            common, questions, alone = self._roomy[2], self._pictured, base.pictured_alone
        elif circumstance.asks_derived:
            questions, alone = [*questions, *base.derived], [*alone, *base.derived_alone]
        configs = self._configs(sides, common, questions, alone)
        async with started(configs, questions, alone) as engines:
            yield engines

    def _configs(
        self, sides: Sequence[Flags], common: Flags, questions: Sequence[Question], alone: Sequence[Answer]
    ) -> list[EngineConfig]:
        """Return the configurations of one engine or two. A proposer on the host is given the answers."""
        known = known_answers(questions, alone)
        found = [self._resolved({**common, **side}) for side in sides]
        return [
            replace(config, speculation=replace(config.speculation, known_answers=known))
            if config.speculation.algorithm.on_host
            else config
            for config in found
        ]

    def _in_tiers(self, given: Flags) -> Flags:
        """Return the settings of KV in two tiers, with hot buffers as small as may be unless they are given; nothing
        where HiSparse is refused and no setting of it is given."""
        tiers: Flags = {**given, "enable_hisparse": True}
        try:
            top_k = self._resolved(tiers).hisparse.top_k
        except ConfigError:
            if given:
                raise
            return {}
        return {"hisparse_config": json.dumps({"device_buffer_size": top_k}), **tiers}

    @property
    def varied(self) -> set[str]:
        """Return the settings that circumstances decide, except for those that the user may set elsewhere or bound,
        and the proposer."""
        sides = (side for one in self.circumstances for side in (one.flags, one.prefill_flags))
        names = {*ALONE, *self._roomy[0], *SETTINGS}.union(*sides) - {"page_size", "num_threads", CONTEXT}
        return {name for name in names if not name.startswith((PREFIX, TIERS))}

    def _resolved(self, flags: Flags) -> EngineConfig:
        given = {**self._given, **ALONE, **flags}
        if "disaggregation_mode" not in flags:
            return resolve(given, warn=lambda text: None).engine
        engine = resolve({**given, "insecure_no_cluster_key": True}, warn=lambda text: None).engine
        return replace(engine, disaggregation=replace(engine.disaggregation, cluster_key=_CLUSTER_KEY))


def failures_of(count: Counter[str]) -> str:
    """Return what an engine has recovered from, in words; "" for nothing."""
    return ", ".join(f"{count[name]:,.0f} {what}" for name, what in _FAILURES.items() if count[name])


def known_answers(questions: Sequence[Question], alone: Sequence[Answer]) -> tuple[KnownAnswer, ...]:
    """Return the answers to plant wrong draft tokens in. The alternative of a token is the likeliest other one."""
    return tuple(
        KnownAnswer(
            prompt=tuple(question.prompt),
            tokens=tuple(answer.tokens),
            alternatives=tuple(
                next(other for other in (*entry.top_ids, (token or 2) - 1) if other != token)
                for token, entry in zip(answer.tokens, answer.logprobs, strict=True)
            ),
        )
        for question, answer in zip(questions, alone, strict=True)
    )


def _differed(engines: Engines, question: Question, answer: Answer) -> bool:
    return engines.findings.differ


async def _play(circumstance: Circumstance, engines: Engines, most_rounds: int) -> tuple[int, list[str]]:
    """Ask until the circumstance came about for each way of choosing tokens. Return the number of rounds, and the ways
    for which it did not."""
    for num_rounds in range(1, most_rounds + 1):
        await circumstance.play(engines)
        missing = engines.ways_without(circumstance.touched)
        if not missing:
            return num_rounds, []
        engines.rotate()
    return most_rounds, missing
