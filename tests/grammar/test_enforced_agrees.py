"""What a reader takes for a call, a grammar of strict tools lets through only as a call that the tool takes."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.grammar.answers import AnswerRules, answer_grammar
from forebay.grammar.lark import CallRule
from forebay.text.answers.parts import CallBegun
from forebay.text.answers.reading import AnswerFormats, reader_for
from tests.grammar.test_answers import Vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Unit": {"type": "string", "enum": ["1", "2"]}},
    "properties": {
        "n": {"type": "integer"},
        "unit": {"$ref": "#/$defs/Unit"},
        "mode": {"anyOf": [{"type": "string", "enum": ["x", "y"]}, {"type": "null"}]},
        "text": {"type": "string"},
    },
    "required": ["n"],
    "additionalProperties": False,
}
CALLS = [CallRule("go", SCHEMA, True, "tools.0"), CallRule("go-on", SCHEMA, True, "tools.1")]
BYTES = Vocabulary(set(), special=True)


def _fits(form: str, text: str, *, must_call: bool = False) -> bool:
    rules = AnswerRules(calls=CALLS, must_call=must_call)
    tokens = list(text.encode())
    matcher = BYTES.matcher(answer_grammar(AnswerFormats(form, None), BYTES.table, rules))
    return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())


def _num_calls(form: str, text: str) -> int:
    reader = reader_for(AnswerFormats(form, None), {call.name: SCHEMA for call in CALLS})
    return sum(isinstance(part, CallBegun) for part in reader.push(text) + reader.finish())


UNMARKED = {
    "minimax_m2": ['<invoke name="go">', 'a <invoke name="go">\n<parameter name="n">', '<invoke name=" go-on ">'],
    "qwen3_coder": ["<function=go>", "a <function=go>\n<parameter=n>", "<function= go-on >"],
    "llama3_json": [
        'a {"name": "go", "parameters": {}}',
        'So {\n"name" : "go-on", "type": "function", "arguments": {}}',
    ],
    "pythonic": ["I call [go(n='x')]", "x [ go-on()]"],
    "deepseek_v4": ['a <｜DSML｜invoke name="go">', '<｜DSML｜invoke name=" go-on ">'],
    "xlam": ['a [{"name": "go", "arguments": {}}]', 'So ```json\n{ "name" : "go-on", "arguments": {}}'],
}
PROSE = {
    "minimax_m2": ['Use <invoke name="other"> or <invoke', "go", ""],
    "qwen3_coder": ["Use <function=other> or <function", "go", ""],
    "llama3_json": ['In C: {"name": "Bob"} {go} {"n": {"name": 1}}', "text {", ""],
    "pythonic": ["See [go](http://x), [1] and a[go]", "text [go", ""],
    "deepseek_v4": ['Use <｜DSML｜invoke name="other">', "go", ""],
    "xlam": ['See [{"name": "Bob"}] or ```json\n{"name": "Bob"}```, [go]', "text [{", ""],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in UNMARKED.items() for text in texts])
def test_answer_grammar_strict_tools_excludes_a_call_that_it_does_not_enforce(form: str, text: str) -> None:
    assert _num_calls(form, text) == 1
    assert not _fits(form, text)


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in PROSE.items() for text in texts])
def test_answer_grammar_strict_tools_allows_text_without_calls(form: str, text: str) -> None:
    assert _num_calls(form, text) == 0
    assert _fits(form, text)


def _coder(*members: tuple[str, str], end: str = "\n</parameter>\n") -> str:
    inside = "".join(f"<parameter={key}>\n{value}{end}" for key, value in members)
    return f"<tool_call>\n<function=go>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("members", "fits"),
    [
        ([("n", "1"), ("text", "a\n b <parameter=c> </function>")], True),
        ([("n", "1"), ("text", "a\n<parameter=c>\nd")], False),
        ([("n", "1"), ("text", "a\n</function>")], False),
        ([("n", "1"), ("unit", "2"), ("mode", "y")], True),
        ([("n", "1"), ("unit", "3")], False),
        ([("n", "1"), ("mode", "z")], False),
        ([("n", "a")], False),
    ],
)
def test_answer_grammar_text_values_hold_only_what_is_read_as_their_value(
    members: list[tuple[str, str]], fits: bool
) -> None:
    assert _fits("qwen3_coder", _coder(*members), must_call=True) == fits


@pytest.mark.parametrize("word", ["maxLength", "pattern"])
def test_answer_grammar_text_limits_in_an_alternative_are_refused(word: str) -> None:
    limited = {"anyOf": [{"type": "string", word: 3 if word == "maxLength" else "a"}, {"type": "null"}]}
    call = CallRule("f", {"properties": {"at": limited}}, True, "tools.0")
    with pytest.raises(InvalidRequest, match=f"{word} of at"):
        answer_grammar(AnswerFormats("qwen3_coder", None), BYTES.table, AnswerRules(calls=[call], must_call=True))
