"""The state of each request in its grammar, and the tokens that may come next.

Grammars are compiled on one thread, and matchers are read and queried on another: each in the order of the calls, both
without the interpreter's lock for most of the time. A matcher follows the tokens of its request, so it outlives a
retraction, and each call first reads the tokens appended since the last one.

Shape letters: N positions, C words of 32 columns each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from forebay.base.errors import EngineError
from forebay.base.parts import I32
from forebay.base.units import ceil_div
from forebay.grammar.compiler import REWINDING, compiled, why_broken
from forebay.grammar.latest import Latest
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar

MAX_ALONE: Final = 16  # rows that one thread fills: 45 us each, less than to wake others takes where cores are few
_KEPT_STEPS: Final = 8  # whose masks somebody may still take: those of a step that failed nobody does


@dataclass(slots=True, eq=False)
class _Place:
    """The position of one request in its grammar. The state behind `matcher` belongs to the thread that fills masks."""

    prototype: Future[LLMatcher]
    rewinds: bool
    matcher: LLMatcher | None = None  # once it is compiled
    num_read: int = 0  # tokens of the output that the matcher was or will be told
    error: str = ""

    @property
    def known(self) -> LLMatcher:
        assert self.matcher is not None, "who is not ready has no tokens and no masks"
        return self.matcher


class _Job(NamedTuple):
    place: _Place
    tokens: list[int]  # to read first
    drafts: list[int]
    at: int  # the first of its positions


class Grammars:
    """See `scheduler.grammars.Grammars`; `take` is for the sampler, on any thread. `make_tokenizer` is called for the
    first grammar, on the thread that compiles."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._make_tokenizer = make_tokenizer
        self._num_words = ceil_div(vocab_size, 32)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._filling = ThreadPoolExecutor(1, "masks")
        self._prototypes = Latest[Future[LLMatcher]]()
        self._places: dict[int, _Place] = {}  # by request
        self._masks: dict[int, Future[I32]] = {}  # by step

    def begin(self, req: Request) -> None:
        """Register a request with a grammar, and start to compile the grammar in the background unless it is cached."""
        assert req.params.grammar is not None, f"{req} has no grammar"
        grammar = req.params.grammar
        self._places[req.id] = _Place(self._prototype(grammar), grammar.kind in REWINDING)

    def ready(self, req: Request) -> bool:
        """Return whether the request's grammar is compiled, so that its tokens can be masked."""
        place = self._places[req.id]
        if place.matcher is None and place.prototype.done():
            place.matcher = place.prototype.result().deep_copy()
        return place.matcher is not None

    def wait(self, timeout_s: float) -> None:
        """Block until one of the pending grammars is compiled, at most `timeout_s`."""
        compiling = {place.prototype for place in self._places.values() if place.matcher is None}
        wait(compiling, timeout_s, FIRST_COMPLETED)

    def drafts(self, req: Request, drafts: Sequence[int], most: int) -> list[int]:
        """Return the longest prefix of the draft tokens that the grammar allows, at most `most` tokens."""
        place, tokens = self._places[req.id], self._unread(req)
        return self._filling.submit(_allowed, place, tokens, list(drafts), most, req.stop_ids).result()

    def fill(self, step: int, wanted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Start to fill the token masks of a step: per request one for the next token, and one behind each draft
        token."""
        jobs, n = [], 0
        for req, drafts in wanted:
            jobs.append(_Job(self._places[req.id], self._unread(req), list(drafts), n))
            n += 1 + len(drafts)
        for old in list(self._masks):  # another thread takes some meanwhile
            if old <= step - _KEPT_STEPS:
                self._masks.pop(old, None)
        self._masks[step] = self._filling.submit(self._fill, jobs, n)

    def take(self, step: int) -> I32:
        """[N, C] of the positions that `fill` was asked for, in their order: bit j % 32 of word j // 32 is set where
        column j may come. Waits for it."""
        return self._masks.pop(step).result()

    def error(self, req: Request) -> EngineError | None:
        """Return the error that ends a request whose matcher failed; None if it works."""
        error = self._places[req.id].error
        if not error:
            return None
        return EngineError(
            f"no token could follow the {req.num_output} tokens of this output in its grammar ({error}): simplify it",
            code="grammar_state",
        )

    def ended(self, req: Request) -> None:
        """Forget a request, and cancel the compilation that no other request waits for."""
        assert req.params.grammar is not None, f"{req} has no grammar"
        prototype = self._places.pop(req.id).prototype
        if any(place.prototype is prototype for place in self._places.values()):
            return
        if prototype.cancel() and self._prototypes.use(req.params.grammar) is prototype:
            self._prototypes.drop(req.params.grammar)

    def _unread(self, req: Request) -> list[int]:
        place = self._places[req.id]
        tokens = req.tokens[req.num_prompt + place.num_read :].tolist()
        place.num_read += len(tokens)
        return tokens

    def _prototype(self, grammar: Grammar) -> Future[LLMatcher]:
        found = self._prototypes.use(grammar)
        if found is None or (found.done() and found.exception()):
            found = self._compiling.submit(self._compile, grammar)
            self._prototypes.keep(grammar, found)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return compiled(grammar, self._tokenizer)

    def _fill(self, jobs: list[_Job], num_positions: int) -> I32:
        words = np.zeros((num_positions, self._num_words), dtype=np.int32)
        for job in jobs:
            _read(job.place, job.tokens)
        self._executor = self._executor or LLExecutor()
        sound = [job for job in jobs if not job.place.error]
        _fill_plain(self._executor, [job for job in sound if not job.drafts], words)
        _fill_drafted(self._executor, [job for job in sound if job.drafts], words)
        for job in jobs:
            if _broken(job.place):  # nothing at all may come: the sampler finds that no token is finite
                words[job.at : job.at + 1 + len(job.drafts)] = 0
        return words


def _fill_plain(executor: LLExecutor, jobs: list[_Job], words: I32) -> None:
    """Fill the mask of each job's next token; many of them on several threads."""
    plain = [(job.place.known, job.at) for job in jobs]
    if len(plain) > MAX_ALONE:
        fill_next_token_bitmask_par(executor, plain, words)
        return
    for matcher, at in plain:
        fill_next_token_bitmask(matcher, words, at)


def _fill_drafted(executor: LLExecutor, jobs: list[_Job], words: I32) -> None:
    """Fill the masks of each job's draft tokens, and of the token after them."""
    if ahead := [(job.place.known, job.at, job.drafts) for job in jobs if job.place.rewinds]:
        fill_next_token_bitmask_par_with_draft_tokens(executor, ahead, words)
    for job in jobs:
        if not job.place.rewinds:
            _fill_ahead(job, words)


def _fill_ahead(job: _Job, words: I32) -> None:
    """By a copy, which need not take anything back. Behind a draft that may not come nothing is looked at."""
    words[job.at : job.at + 1 + len(job.drafts)] = -1
    ahead = job.place.known.deep_copy()
    fill_next_token_bitmask(ahead, words, job.at)
    for at, draft in enumerate(job.drafts, job.at + 1):
        if not ahead.consume_token(draft):
            return
        fill_next_token_bitmask(ahead, words, at)


def _read(place: _Place, tokens: list[int]) -> None:
    if not tokens or place.error:
        return
    place.known.consume_tokens(tokens)
    _broken(place)


def _broken(place: _Place) -> bool:
    place.error = place.error or why_broken(place.known)
    return bool(place.error)


def _allowed(place: _Place, tokens: list[int], drafts: list[int], most: int, stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens that the grammar forces, else the draft tokens that it allows, up to an end token."""
    _read(place, tokens)
    if place.error:
        return []
    found = place.known.compute_ff_tokens()[:most] or drafts[: place.known.validate_tokens(drafts)]
    return found[: next((i for i, token in enumerate(found) if token in stop_ids), len(found))]
