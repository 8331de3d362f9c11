"""Grammars of texts, rewritten for the JSON of these texts: each takes a text where the other takes its JSON."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from forebay.base.errors import InvalidRequest
from forebay.grammar.quoted import _COMMON, quoted
from forebay.grammar.vocabulary import Vocabulary
from tests.text.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXTS = [
    "", "a", "ab", "abc", "A", "aB", "b", '"', '""', '"a"', "\\", "\\\\", "\n", "\r\n", "a\n", "\na", "\t", " ", " a",
    "/", "a/b", "\x01", "\x7f", "é", "日本", "👩", "1", "-1", "1.5", "a_1", "a b", 'say "hi"', "{\n}", "[1]",
    "a.b", "?", "z", "Zz", "F", "f0", "g", "_a", "0x", "12", "+3", "+-3", "1.", ".5", "-1.5E+3", "1e5", "1e",
    "\f", "\r", "\n\n", "\r\r\n", " \t", " \f\r\n", '"', '"\\"', '"\\""', '"\\n"', '"a', "\u2028", "z\n", "e5", "E-5",
    "1.e5", "#", "# é", "#\n", "//", "// a", "/", "--", "-- a", "--\n", "-", "+1e5", "-.5", "-12",
]  # fmt: skip
GRAMMARS = [
    'start: "a" "b"? "c"*',
    'start: "aB"i',
    r'start: "\"" /[a-z]*/ "\""',
    r"start: /.+/",
    r"start: /(.|\n)+/",
    r"start: /[^a]+/",
    r"start: /[^\n\"]*/",
    r"start: /\s+/ | /\S+/",
    r"start: /\w+/ (/\W/ /\w+/)?",
    r"start: /\d+(\.\d+)?/ | /-\d/",
    r"start: /[\x00-\x1f]/ | /\\+/",
    r"start: /a\/b/ | /\// | /[?.\/]/",
    r"start: /[é日]+本?/ | /👩/",
    r"start: /a(b|c)?/i",
    r"start: /a{1,2}b{0,1}c?/",
    'start: line+\nline: /[^\\n]*/ LF -> row\n%import common.LF',
    "start: CNAME | SIGNED_NUMBER | ESCAPED_STRING\n%import common.CNAME\n%import common.SIGNED_NUMBER\n"
    "%import common.ESCAPED_STRING",
    'start: BRACE NEWLINE END // braces\nBRACE: "{"\nEND: "}"\n%import common.NEWLINE',
    *(f"start: {name}\n%import common.{name}" for name in _COMMON),
]  # fmt: skip


@cache
def vocabulary() -> LLTokenizer:
    return Vocabulary.of(TOKENIZER.table, [2], 49152).tokenizer(TOKENIZER.encode)


def taken(source: str, texts: list[str]) -> list[str]:
    """Return the texts that the grammar takes."""
    begun = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(source), log_level=0)
    assert not begun.is_error(), (source, begun.get_error())
    return [text for text in texts if _takes(begun.deep_copy(), TOKENIZER.encode(text))]


def _takes(matcher: LLMatcher, tokens: list[int]) -> bool:
    whole = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
    return bool(whole and matcher.is_accepting())


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_quoted_grammar_takes_the_json_of_what_the_grammar_takes(grammar: str) -> None:
    inside = f'start: "<" text0 ">"\n{quoted(grammar).replace("start:", "text0:", 1)}'
    written = {f"<{json.dumps(text, ensure_ascii=False)[1:-1]}>".replace("\x7f", "\\u007f"): text for text in TEXTS}
    assert [written[text] for text in taken(inside, list(written))] == taken(grammar, list(written.values())) != []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (r"start: /(?=a)b/", "not supported"),
        (r"start: /(a)\1/", "not supported"),
        (r"start: /[/", "cannot be read"),
        (r"start: /a/x", "the flag x"),
        (r'start: "\q"', "cannot be read"),
        ("start: A\n%declare A", "%declare"),
        ("start: WSX\n%import common.WSX", "common.WSX"),
        (f"start: /{'(' * 3000}a{')' * 3000}/", "cannot be read"),
    ],
)
def test_quoted_grammar_of_other_notation_is_refused_with_its_field(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        quoted(grammar, "tools.0")
    assert (refused.value.code, refused.value.param) == ("grammar_invalid", "tools.0")
