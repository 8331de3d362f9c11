"""What may come at the places of a step with drafts is what may come when its tokens are read one by one (C16)."""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from forebay.grammar import matching
from forebay.grammar.compiler import CHECKED, compiled
from forebay.grammar.matching import Grammars
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.deadlines import HANGS_S

LETTERS = "abc,"
END = len(LETTERS)
VOCABULARY = Vocabulary([*(letter.encode() for letter in LETTERS), b"</s>"], [END], [END])
WORDS = "(a|b)(a|b|c){0,3}(,(a|b)(a|b|c){0,3}){1,3}"
COUNTED = {
    "grammars": [{"name": "answer", "lark_grammar": 'start: thought "," /[ab]+/\nthought[max_tokens=5]: /[abc]*/'}]
}
GRAMMARS = {
    "rewinds": Grammar(GrammarKind.REGEX, WORDS),
    "copies": Grammar(GrammarKind.LARK, f"start: /{WORDS}/"),
    "counts": Grammar(GrammarKind.ANSWER, json.dumps(COUNTED)),
}


@functools.cache
def tokenizer() -> LLTokenizer:
    return VOCABULARY.tokenizer(lambda text: [LETTERS.index(letter) for letter in text])


def grammars() -> Grammars:
    return Grammars(tokenizer, END + 1)


def request(grammar: Grammar, number: int = 1) -> Request:
    return Request(number, [0], SamplingParams(grammar=grammar, stop_token_ids=(END,), max_tokens=64))


def begun(known: Grammars, grammar: Grammar, number: int = 1) -> Request:
    req = request(grammar, number)
    known.begin(req)
    known.wait(HANGS_S)
    assert known.ready(req)
    return req


def allowed(words: Any) -> list[list[int]]:
    """Of each position."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : END + 1]
    return [np.flatnonzero(row).tolist() for row in bits]


def masks(known: Grammars, req: Request, drafts: list[int], step: int = 1) -> list[list[int]]:
    known.fill(step, [(req, drafts)])
    return allowed(known.take(step))


@functools.cache
def one_by_one(grammar: Grammar, output: tuple[int, ...]) -> list[int]:
    """What may follow an output that a matcher of its own reads."""
    known = grammars()
    req = begun(known, grammar)
    for token in output:
        masks(known, req, [])
        req.tokens.append(token)
    return masks(known, req, [])[0]


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(2))
def test_c16_matching_masks_behind_drafts_are_those_of_tokens_read_one_by_one(name: str, seed: int) -> None:
    rng, known, grammar = Random(seed), grammars(), GRAMMARS[name]
    req, output = begun(known, grammar), []
    for step in range(1, 20):
        here = one_by_one(grammar, (*output,))
        drafts: list[int] = []
        while len(drafts) < 4 and rng.random() < 0.8:
            may = [token for token in one_by_one(grammar, (*output, *drafts)) if token != END]
            drafts.append(rng.choice(may) if may and rng.random() < 0.8 else rng.randrange(END))
        found, legal = masks(known, req, drafts, step), 0
        assert found[0] == here
        while legal < len(drafts) and drafts[legal] in found[legal]:
            legal += 1
            assert found[legal] == one_by_one(grammar, (*output, *drafts[:legal]))
        if name != "rewinds":  # there the library decides
            assert all(here == [*range(END + 1)] for here in found[legal + 1 :])
        taken = drafts[: rng.randint(0, legal)]
        here = [token for token in found[len(taken)] if token != END]
        if not here:
            return
        output += [*taken, rng.choice(here)]
        req.tokens.extend(output[len(req.tokens) - 1 :])


def test_matching_drafts_of_a_grammar_end_before_an_end_and_at_what_it_refuses() -> None:
    known = grammars()
    req = begun(known, Grammar(GrammarKind.REGEX, "[ab]{1,9}"))
    assert known.drafts(req, [0, 1, END, 0], 4) == [0, 1]
    assert known.drafts(req, [0, 2, 1], 4) == [0]
    forced = begun(known, Grammar(GrammarKind.REGEX, "abcab"), 2)
    assert known.drafts(forced, [], 3) == [0, 1, 2]


@pytest.mark.parametrize("name", GRAMMARS)
def test_matching_matcher_that_breaks_allows_nothing_at_any_place(name: str) -> None:
    known = grammars()
    req = begun(known, GRAMMARS[name])
    req.tokens.append(END)  # with which no output begins
    assert masks(known, req, [0, 1]) == [[], [], []]
    assert known.error(req).code == "grammar_state"


def test_matching_matcher_that_breaks_at_a_mask_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "compiled", lambda grammar, tokenizer: compiled(grammar, tokenizer, CHECKED))
    vocabulary = Vocabulary([b"</s>", b"x" * 16, b"x", b"y"], [0], [0])
    known = Grammars(lambda: vocabulary.tokenizer(lambda text: [2] * len(text)), len(vocabulary.tokens))
    req = begun(known, Grammar(GrammarKind.REGEX, "y+|((x{0,100}){0,100}){0,100}"))
    assert masks(known, req, [])[0]
    req.tokens.append(1)
    assert masks(known, req, [2, 2], 2) == [[], [], []]
    assert known.error(req).code == "grammar_state"


def test_matching_grammar_that_could_not_be_compiled_is_tried_again() -> None:
    known, first = grammars(), request(GRAMMARS["rewinds"])
    make, known._make_tokenizer = known._make_tokenizer, lambda: 1 / 0
    known.begin(first)
    known.wait(HANGS_S)
    with pytest.raises(ZeroDivisionError):
        known.ready(first)
    known.ended(first)
    known._make_tokenizer = make
    assert masks(known, begun(known, GRAMMARS["rewinds"], 2), []) == [[0, 1]]


def test_matching_masks_of_steps_that_failed_are_not_kept() -> None:
    known = grammars()
    req = begun(known, GRAMMARS["rewinds"])
    for step in range(1, 40):
        known.fill(step, [(req, [])])
    assert len(known._masks) <= 9
    assert allowed(known.take(39)) == [[0, 1]]
