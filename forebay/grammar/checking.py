"""Checks of clients' grammars before an engine compiles them, in a process that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from forebay.base.confined import ConfinedProcess, Late, Limits, NoAnswer, Processes
from forebay.base.errors import InvalidRequest, Overloaded
from forebay.grammar.compiler import MAX_ERROR_CHARS, check_size, refused
from forebay.grammar.latest import Latest
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar

LIMITS: Final = Limits(cpu_s=2.0, memory_bytes=512 << 20, answer_bytes=8 * MAX_ERROR_CHARS)
MAX_WAIT_S: Final = 60.0  # by the clock: a process that is yet to start, on a machine that has no time for it

encode: Final = msgspec.msgpack.Encoder().encode


def _started(make_vocabulary: Callable[[], Vocabulary]) -> ConfinedProcess:
    question = encode(make_vocabulary())
    process = ConfinedProcess("forebay.grammar.check_worker", LIMITS, "grammars")
    try:
        process.exchange(question, MAX_WAIT_S)
    except BaseException:
        process.end()
        raise
    return process


class GrammarChecks:
    """Results of the latest grammar checks. Thread-safe."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        """`make_vocabulary` is called whenever a process starts."""
        self._processes = Processes(partial(_started, make_vocabulary))
        self._known = Latest[str]()  # what is wrong with it
        self._lock = threading.Lock()

    def recall(self, grammar: Grammar) -> bool:
        """Return whether the result is known, without waiting. Raises InvalidRequest if the known result is a fault, or
        if the grammar is too large."""
        check_size(grammar)
        with self._lock:
            wrong = self._known.use(grammar)
        if wrong is None:
            return False
        if wrong:
            raise InvalidRequest(wrong, code="grammar_invalid")
        return True

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest `grammar_invalid` with the place for one that no engine would compile, or not within
        the limits; Overloaded where that could not be found out."""
        if self.recall(grammar):
            return
        wrong = self._ask(grammar)
        with self._lock:
            self._known.keep(grammar, wrong)
        if wrong:
            raise InvalidRequest(wrong, code="grammar_invalid")

    def _ask(self, grammar: Grammar) -> str:
        try:
            with self._processes.one() as process:
                return process.exchange(encode(grammar), MAX_WAIT_S).decode()
        except Late as error:
            raise Overloaded(f"checking the grammar {error}: the server is busy, try again later") from error
        except NoAnswer as error:
            return refused(grammar, f"compiling it {error}").message
