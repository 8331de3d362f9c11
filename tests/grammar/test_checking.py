"""Clients' grammars are checked where they can do no harm, and what is known of them is remembered."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forebay.base.confined import Late, NoAnswer
from forebay.base.errors import InvalidRequest, Overloaded
from forebay.grammar import checking, latest
from forebay.grammar.checking import LIMITS, GrammarChecks
from forebay.grammar.compiler import MAX_BYTES
from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.deadlines import wait_until
from tests.grammar.vocabularies import VOCABULARY

GOOD = Grammar(GrammarKind.REGEX, "a+")
BAD = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strin"}')


class Scripted:
    """A process that answers every question so."""

    has_ended = False
    asked = 0

    def __init__(self, answer: str | Exception) -> None:
        self._answer = answer

    def exchange(self, question: bytes, timeout_s: float) -> bytes:
        Scripted.asked += 1
        if isinstance(self._answer, Exception):
            self.has_ended = True
            raise self._answer
        return self._answer.encode()

    def end(self) -> None:
        self.has_ended = True


def scripted(monkeypatch: pytest.MonkeyPatch, *answers: str | Exception) -> GrammarChecks:
    processes = map(Scripted, answers)
    monkeypatch.setattr(checking, "_started", lambda make_vocabulary: next(processes))
    monkeypatch.setattr(Scripted, "asked", 0)
    return GrammarChecks(lambda: VOCABULARY)


def test_a_process_with_little_of_everything_says_what_is_wrong_and_where() -> None:
    checks = GrammarChecks(lambda: VOCABULARY)
    checks.check(GOOD)
    (process,) = checks._processes.living
    with pytest.raises(InvalidRequest, match="strin") as caught:
        checks.check(BAD)
    assert caught.value.code == "grammar_invalid"
    assert checks.recall(GOOD)
    pid = process._child.pid
    assert str(LIMITS.memory_bytes) in Path(f"/proc/{pid}/limits").read_text()
    ours = os.getpriority(os.PRIO_PROCESS, 0)  # not 0 where the tests themselves run behind others
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, ours + 10)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process.has_ended)
    with pytest.raises(InvalidRequest, match="strin"):
        checks.check(BAD)  # nobody is asked what is known
    checks.check(Grammar(GrammarKind.REGEX, "b+"))
    assert len(checks._processes.living) == 1


def test_a_grammar_that_takes_too_much_is_refused_for_good_and_the_next_one_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = scripted(monkeypatch, NoAnswer("took longer than 2 s"), "")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="compiling it took longer than 2 s") as caught:
            checks.check(BAD)
        assert caught.value.code == "grammar_invalid"
    assert Scripted.asked == 1
    checks.check(GOOD)
    assert Scripted.asked == 2


def test_a_machine_without_time_says_nothing_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = scripted(monkeypatch, Late("gave no answer in 60 s"), "")
    with pytest.raises(Overloaded, match="try again"):
        checks.check(GOOD)
    checks.check(GOOD)


def test_the_latest_are_remembered_and_what_is_too_large_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = scripted(monkeypatch, "")
    monkeypatch.setattr(latest, "MAX_GRAMMARS", 2)
    for text in ("a", "b", "a", "c"):
        checks.check(Grammar(GrammarKind.REGEX, text))
    assert [checks.recall(Grammar(GrammarKind.REGEX, text)) for text in "abc"] == [True, False, True]
    for text, why in (("é" * (MAX_BYTES // 2 + 1), f"at most {MAX_BYTES}"), ("\ud800", "surrogate")):
        with pytest.raises(InvalidRequest, match=why):
            checks.check(Grammar(GrammarKind.REGEX, text))
    assert Scripted.asked == 3


def test_limits_of_a_checking_process_are_as_documented() -> None:
    assert (LIMITS.cpu_s, LIMITS.memory_bytes, LIMITS.answer_bytes) == (2.0, 512 * 1024**2, 4_000)
