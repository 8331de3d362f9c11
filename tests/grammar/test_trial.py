"""A grammar that compiles and breaks when it is used is refused before anybody waits for an answer."""

from __future__ import annotations

import pytest

from forebay.grammar.check_worker import Worker
from forebay.grammar.checking import encode
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind

VOCABULARY = Vocabulary([b"</s>", b"x" * 16, *(bytes([i]) * n for i in range(32, 127) for n in (1, 5))], [0], [0])


@pytest.fixture(scope="module")
def worker() -> Worker:
    made = Worker()
    assert made.answer(encode(VOCABULARY)) == b""
    return made


DOUBLED = "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"'])


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (GrammarKind.REGEX, "y+|((x{0,100}){0,100}){0,100}", "too many expressions"),
        (GrammarKind.LARK, DOUBLED, "Too many items"),
        (GrammarKind.REGEX, "x+|(([^x]{0,100}){0,100}){0,100}", "too many expressions"),
    ],
)
def test_what_breaks_behind_a_few_tokens_is_refused_with_their_number(
    worker: Worker, kind: GrammarKind, text: str, why: str
) -> None:
    answer = worker.answer(encode(Grammar(kind, text))).decode()
    assert "breaks behind" in answer
    assert why in answer


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.CHOICE, '["a"]'),  # ends at once
        Grammar(GrammarKind.REGEX, ""),
        Grammar(GrammarKind.LARK, 'start: "x" y*\ny: "y"'),
        Grammar(GrammarKind.JSON_OBJECT),
    ],
    ids=str,
)
def test_what_does_not_is_taken(worker: Worker, grammar: Grammar) -> None:
    assert worker.answer(encode(grammar)) == b""


def test_trial_ambiguous_grammar_that_breaks_behind_hundreds_of_tokens_is_refused(worker: Worker) -> None:
    answer = worker.answer(encode(Grammar(GrammarKind.LARK, 'start: e\ne: e e e | e e | "a"'))).decode()
    assert "breaks behind 100 tokens" in answer
