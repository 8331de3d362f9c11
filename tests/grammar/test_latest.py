"""How much is remembered of grammars is bounded by what they take, not by their number alone."""

from __future__ import annotations

import pytest

from forebay.grammar import latest
from forebay.grammar.latest import Latest
from forebay.requests.sampling_params import Grammar, GrammarKind


def of(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_the_latest_used_are_kept_as_far_as_their_texts_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "MAX_CHARS", 6)
    known = Latest[int]()
    for n, text in enumerate(("aa", "bb", "cc"), 1):
        known.keep(of(text), n)
    known.keep(of("bb"), 4)  # once more, and counted once
    assert known.use(of("aa")) == 1
    known.keep(of("d"), 5)
    assert [known.use(of(text)) for text in ("aa", "bb", "cc", "d")] == [1, 4, None, 5]
    known.drop(of("bb"))
    known.keep(of("eee"), 6)
    assert [known.use(of(text)) for text in ("aa", "d", "eee")] == [1, 5, 6]
    known.keep(of("longer than all"), 7)
    assert len(known) == 1
    assert known.use(of("longer than all")) == 7


def test_latest_keeps_256_grammars_and_texts_of_a_mebichar() -> None:
    known = Latest[int]()
    for n in range(257):
        known.keep(of(str(n)), n)
    assert [known.use(of(str(n))) for n in (0, 1, 256)] == [None, 1, 256]
    long = [of(letter * (1 << 19)) for letter in "abc"]
    known = Latest[int]()
    for grammar in long[:2]:
        known.keep(grammar, 1)
    assert len(known) == 2
    known.keep(of("d"), 1)
    assert [known.use(grammar) for grammar in long] == [None, 1, None]
