"""Patterns that end an output are met where the standard library finds them, character by character."""

from __future__ import annotations

import random
import re

import pytest

from forebay.text.detokenizer import Detokenizer
from forebay.text.stop_patterns import MAX_MATCH_CHARS, BadPattern, PatternSearch, machine_of
from tests.text.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(600)
ATOMS = ["a", "b", "1", ".", r"\d", "[ab]", "[^a]", r"\w", r"\s"]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{1,}", "+?"]


def pattern(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(7) if depth < 3 else 0
    if kind < 2:
        return rng.choice(ATOMS)
    parts = [pattern(rng, depth + 1) for _ in range(2)]
    if kind < 5:
        return "".join(parts)
    return f"({'|'.join(parts)})" if kind == 5 else f"(?:{parts[0]}){rng.choice(REPEATS)}"


def first_match(found: re.Pattern[str], text: str) -> tuple[int, int] | None:
    """That which ends first, and of those the longest."""
    spans = ((begin, end) for end in range(1, len(text) + 1) for begin in range(end))
    return next((span for span in spans if found.fullmatch(text, *span)), None)


@pytest.mark.parametrize("seed", range(4))
def test_the_match_that_ends_first_is_found_and_nothing_of_it_is_shown(seed: int) -> None:
    rng, matches = random.Random(seed), 0
    for _ in range(400):
        source = pattern(rng)
        text = "".join(rng.choice("aab1c \n") for _ in range(rng.randrange(12)))
        if re.fullmatch(source, ""):
            continue
        wanted = first_match(re.compile(source), text)
        matches += wanted is not None
        search = PatternSearch(source)
        assert next(filter(None, map(search.push, text)), None) == wanted, (source, text)
        detokenizer = Detokenizer(TOKENIZER.table, patterns=(source,))
        deltas = [detokenizer.push([token]) for token in TOKENIZER.encode(text)]
        end = next((i for i, delta in enumerate(deltas) if delta.stopped), None)
        shown = "".join(delta.text for delta in deltas[: None if end is None else end + 1])
        shown += detokenizer.finish().text if end is None else ""
        assert shown == (text if wanted is None else text[: wanted[0]])
    assert matches > 50


def test_what_may_begin_a_match_is_held_back_and_no_more() -> None:
    detokenizer = Detokenizer(TOKENIZER.table, ("STOP",), patterns=(r"\n\n\d+\.",))
    assert [detokenizer.push([token]).text for token in TOKENIZER.encode("x\n\n12 \n")] == [
        "x", "", "", "", "", "\n\n12 ", "",
    ]  # fmt: skip
    assert detokenizer.push(TOKENIZER.encode("\n3.")) == ("", r"\n\n\d+\.", 3)


def test_a_match_longer_than_is_looked_for_is_none() -> None:
    search = PatternSearch("a[^c]*c")
    assert search.push("a" + "b" * 2 * MAX_MATCH_CHARS) is None
    assert search.held <= MAX_MATCH_CHARS
    assert search.push("c") is None


@pytest.mark.parametrize(
    ("source", "words"),
    [("a*", "empty string"), ("(a", "not closed"), ("a)", "not open"), ("^a", "anchors"), (r"(a)\1", "references"),
     ("(?=a)", r"only \(...\)"), ("a{3,1}", "ends before"), ("(a{90}){90}", "256 places"), ("[a", "missing here"),
     ("[[a]b]", "nested set"), ("[b-a]", "bad character range"), ("+", "missing here"), ("(" * 99 + "a", "not closed")],
)  # fmt: skip
def test_what_is_no_pattern_here_is_refused_with_the_place(source: str, words: str) -> None:
    with pytest.raises(BadPattern, match=words):
        machine_of(source)
