"""Grammars of the hash model: what may follow an output is a hash of all its tokens, so that a matcher that has read
one too few or somebody else's allows other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from forebay.base.errors import EngineError
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.simulation.hashing import I64, KEY, mix, mix_array
from tests.simulation.liveness import require

_FORCES: Final = 4  # of so many states one allows a single token
_PATIENCE: Final = 3  # looks at a grammar until it is compiled, at most


def grammar_of(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(number))


class Matcher:
    """Where an output stands: at its beginning, and behind each token read."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        assert params.grammar is not None
        self._vocab, self._state = vocab, mix(int(params.grammar.text) + 1)

    def copy(self) -> Matcher:
        other = object.__new__(Matcher)
        other._vocab, other._state = self._vocab, self._state
        return other

    def read(self, token: int) -> None:
        self._state = mix(self._state ^ int(KEY[token]))

    @property
    def allowed(self) -> I64:
        """The tokens that may come; there is always one."""
        if self._state % _FORCES:
            bits = mix_array(KEY[: self._vocab] ^ np.uint64(self._state)) >> np.uint64(63)
            if bits.any():
                return np.flatnonzero(bits)
        return np.array([(self._state >> 8) % self._vocab])


class HashGrammars:
    """`scheduler.grammars.Grammars`, and `take` for the runner."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.matchers: dict[int, Matcher] = {}
        self.num_read: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        self._masks: dict[int, list[I64]] = {}

    def begin(self, req: Request) -> None:
        self.matchers[req.id], self.num_read[req.id] = Matcher(req.params, self._vocab), 0
        self._patience[req.id] = req.id % _PATIENCE

    def ready(self, req: Request) -> bool:
        self._patience[req.id] -= 1
        return self._patience[req.id] < 0

    def wait(self, timeout_s: float) -> None: ...

    def drafts(self, req: Request, guesses: Sequence[int], most: int) -> list[int]:
        ahead, found = self._at_the_end_of(req).copy(), list[int]()
        while len(found) < most and len(allowed := ahead.allowed) == 1 and int(allowed[0]) not in req.stop_ids:
            found.append(int(allowed[0]))
            ahead.read(found[-1])
        for guess in guesses if not found else ():
            if guess not in ahead.allowed or guess in req.stop_ids:
                break
            found.append(guess)
            ahead.read(guess)
        return found

    def fill(self, step: int, wanted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        self._masks[step] = masks = []
        for req, drafts in wanted:
            ahead = self._at_the_end_of(req).copy()
            masks.append(ahead.allowed)
            for draft in drafts:
                ahead.read(draft)
                masks.append(ahead.allowed)

    def take(self, step: int) -> list[I64]:
        return self._masks.pop(step)

    def error(self, req: Request) -> EngineError | None:
        return None

    def ended(self, req: Request) -> None:
        for of_each in (self.matchers, self.num_read, self._patience):
            del of_each[req.id]

    def _at_the_end_of(self, req: Request) -> Matcher:
        require(self._patience[req.id] < 0, f"the grammar of {req} is not compiled")
        matcher = self.matchers[req.id]
        for token in req.tokens[req.num_prompt + self.num_read[req.id] :].tolist():
            matcher.read(token)
            self.num_read[req.id] += 1
        return matcher
