"""Which outputs a dry run begins: of which tokens, and how long."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.base.errors import InvalidRequest
from forebay.grammar import dry_run
from forebay.grammar.compiler import CHECKED, GROWING, Work
from forebay.grammar.dry_run import DryRun
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.grammar.vocabularies import tokenizer

END, LONG, SPACES = 0, 5, 6
LETTERS = (2, 4, 7)
VOCABULARY = Vocabulary([b"</s></s>", b"", b"a", b"bb", b"c", b"dddd", b" " * 6, b"e"], [END], [END])


class Scripted:
    """A matcher that allows every column; it breaks behind `breaks` tokens, or then allows none."""

    def __init__(self, begun: list[Scripted], breaks: int = 1000, ends: int = 1000) -> None:
        self.begun, self.breaks, self.ends = begun, breaks, ends
        self.output: list[int] = []

    def deep_copy(self) -> Scripted:
        made = Scripted(self.begun, self.breaks, self.ends)
        self.begun.append(made)
        return made

    def compute_bitmask(self) -> bytes:
        columns = np.full(len(VOCABULARY.tokens), len(self.output) < self.ends)
        return np.packbits(columns, bitorder="little").tobytes()

    def consume_token(self, token: int) -> None:
        self.output.append(token)

    def is_error(self) -> bool:
        return len(self.output) == self.breaks

    def get_error(self) -> str:
        return "too much\nof it"


def run(monkeypatch: pytest.MonkeyPatch, kind: GrammarKind, **script: int) -> list[list[int]]:
    """Return the outputs that a dry run begins."""
    begun: list[Scripted] = []

    def compiled(grammar: Grammar, _: object, work: Work) -> Scripted:
        assert work is (GROWING if begun else CHECKED)
        made = Scripted(begun, **script)
        return made.deep_copy() if begun else made

    monkeypatch.setattr(dry_run, "compiled", compiled)
    DryRun(VOCABULARY).run(Grammar(kind, "x"), tokenizer())
    return [matcher.output for matcher in begun]


def test_dry_run_has_outputs_of_12_long_short_and_any_tokens_and_of_a_lark_grammar_256_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = run(monkeypatch, GrammarKind.REGEX)
    assert outputs[0] == [LONG] * 12
    assert set(outputs[1]) == set(LETTERS)
    assert outputs[2] == [SPACES] * 12
    assert set(outputs[3]) == {2, 3, 4, LONG, SPACES, 7}
    assert list(map(len, outputs)) == [12] * 4
    *short, growing = run(monkeypatch, GrammarKind.LARK)
    assert short == outputs
    assert len(growing) == 256
    assert min(map(growing.count, LETTERS)) > 70  # in turn: all of a group have a branch of their own


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.LARK])
def test_dry_run_output_that_ends_or_has_no_text_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, kind: GrammarKind
) -> None:
    assert {len(output) for output in run(monkeypatch, kind, ends=3)} == {3}


@pytest.mark.parametrize("breaks", [0, 1, 11, 12])
def test_dry_run_output_that_breaks_is_refused_with_its_tokens_and_the_first_line(
    monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(monkeypatch, GrammarKind.REGEX, breaks=breaks)
    assert caught.value.message.endswith(f"an output breaks behind {breaks} tokens: too much")


def test_dry_run_output_that_breaks_behind_its_last_token_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run(monkeypatch, GrammarKind.REGEX, breaks=13)) == 4
