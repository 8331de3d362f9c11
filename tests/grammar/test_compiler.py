"""Grammars are compiled within limits, and say what is wrong with them and where."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forebay.base.errors import InvalidRequest
from forebay.base.json_text import MAX_DEPTH
from forebay.grammar.compiler import MAX_BYTES, compiled, refused, source_of
from forebay.grammar.vocabulary import FORCED_CHARS, Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.grammar.vocabularies import EOS, PADDED, TOKENIZER, VOCABULARY, encode, tokenizer

TAGS = {
    "structures": [{"begin": "<f>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"}],
    "triggers": ["<f"],
}
ANSWERS = {
    GrammarKind.JSON_SCHEMA: ('{"enum": ["a", 1]}', '"a"', '"b"'),
    GrammarKind.JSON_OBJECT: ("", '{"a": [1]}', "[]"),
    GrammarKind.REGEX: ("a+b", "aab", "b"),
    GrammarKind.CHOICE: ('["é\\"/", "ab"]', 'é"/', "b"),
    GrammarKind.LARK: ('start: "x" y*\ny: "y"', "xyy", "y"),
    GrammarKind.STRUCTURAL: (json.dumps(TAGS), "so: <f>{}</f>", "so: <f>{1"),
    GrammarKind.ANSWER: ('{"grammars": [{"lark_grammar": "start: \\"ab\\""}]}', "ab", "b"),
}


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("kind", GrammarKind)
def test_each_kind_matches_what_it_says_and_then_ends(kind: GrammarKind) -> None:
    text, good, bad = ANSWERS[kind]
    matcher, wrong = (compiled(Grammar(kind, text), tokenizer()) for _ in range(2))
    tokens = encode(good)
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    others = encode(bad)
    assert wrong.validate_tokens(others) < len(others)


def test_control_tokens_and_columns_without_bytes_are_never_text() -> None:
    everything = compiled(Grammar(GrammarKind.REGEX, r"(.|\n)*"), tokenizer())
    may = allowed(everything.compute_bitmask())
    assert may & TOKENIZER.table.skipped == {EOS}  # an end, not the text that it is spelled with
    assert max(may) < TOKENIZER.vocab_size < PADDED
    spelled = compiled(Grammar(GrammarKind.CHOICE, '["<|im_start|>"]'), tokenizer())
    assert allowed(spelled.compute_bitmask()) == {encode("<")[0]}


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "strin"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/x"}', "/x"),
        (GrammarKind.JSON_SCHEMA, "{", "line 1 column 2"),
        (GrammarKind.JSON_SCHEMA, nested(MAX_DEPTH + 1), f"deeper than {MAX_DEPTH} levels"),
        (GrammarKind.JSON_SCHEMA, "[" * 30_000, "no JSON"),
        (GrammarKind.JSON_SCHEMA, '{"title": "' + "x" * MAX_BYTES + '"}', f"at most {MAX_BYTES}"),
        (GrammarKind.REGEX, "(unclosed", "1(8)"),
        (GrammarKind.LARK, 'start: "a" bar', 'unknown name: "bar"'),
        (GrammarKind.CHOICE, "[]", "list of strings"),
        (GrammarKind.CHOICE, '["a", ""]', "not empty"),
        (GrammarKind.STRUCTURAL, '{"structures": [{"begin": "<g>"}], "triggers": ["<f"]}', "<g>"),
        (GrammarKind.STRUCTURAL, "[]", "structural"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_place(kind: GrammarKind, text: str, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(Grammar(kind, text), tokenizer())
    assert (caught.value.code, caught.value.param) == ("grammar_invalid", "grammar")
    assert place in caught.value.message
    assert len(caught.value.message) < 600


def test_of_a_long_text_that_is_forced_only_the_beginning_is_made_tokens_of_and_once() -> None:
    text, asked = json.dumps([f"word {i} of the text" for i in range(1500)]), list[str]()

    def counted(part: str) -> list[int]:
        asked.append(part)
        return encode(part)

    matcher = compiled(Grammar(GrammarKind.CHOICE, json.dumps([text])), VOCABULARY.tokenizer(counted))
    for token in encode(text)[:40]:
        assert allowed(matcher.compute_bitmask()) == {token}
        assert matcher.consume_token(token)
    assert max(map(len, asked)) == FORCED_CHARS < len(text) / 50
    assert len(set(asked)) == len(asked)


def sized(kind: GrammarKind, num_bytes: int) -> Grammar:
    """A grammar of a text, whose last letters have two bytes."""
    if kind is GrammarKind.CHOICE:
        return Grammar(kind, json.dumps(["x" * (num_bytes - 8) + "éé"], ensure_ascii=False))
    source = '{"grammars": [{"lark_grammar": "start: \\"ab\\" // é"}]}'
    return Grammar(kind, source.replace("é", "x" * (num_bytes - len(source) - 1) + "é"))


@pytest.mark.parametrize(
    ("fits", "more", "why"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, nested(31)), Grammar(GrammarKind.JSON_SCHEMA, nested(33)), "32 levels"),
        (
            Grammar(GrammarKind.CHOICE, json.dumps(list(map(str, range(1024))))),
            Grammar(GrammarKind.CHOICE, json.dumps(list(map(str, range(1025))))),
            "1025 texts; at most 1024",
        ),
        (sized(GrammarKind.CHOICE, 64 << 10), sized(GrammarKind.CHOICE, (64 << 10) + 1), "65537 bytes; at most 65536"),
        (sized(GrammarKind.ANSWER, 512 << 10), sized(GrammarKind.ANSWER, (512 << 10) + 1), "at most 524288"),
    ],
    ids=["depth", "choices", "bytes", "bytes of an answer"],
)
def test_grammar_at_a_documented_limit_is_taken_and_one_beyond_is_refused(
    fits: Grammar, more: Grammar, why: str
) -> None:
    source_of(fits)
    with pytest.raises(InvalidRequest, match=why):
        source_of(more)


def test_grammar_error_is_cut_to_500_characters() -> None:
    texts = (refused(Grammar(GrammarKind.REGEX, "x"), "w" * num_chars).message for num_chars in (500, 501))
    assert [(text.count("w"), text.endswith(" [..]")) for text in texts] == [(500, False), (500, True)]


def test_vocabulary_without_an_end_token_has_no_grammars() -> None:
    with pytest.raises(InvalidRequest, match="names none") as caught:
        Vocabulary.of(TOKENIZER.table, [], PADDED)
    assert caught.value.param == "grammar"
