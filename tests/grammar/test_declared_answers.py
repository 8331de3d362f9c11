"""Whatever may be sampled where a call must be made is read as that call, in every form that a checkpoint declares."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from forebay.base.errors import InvalidRequest
from forebay.grammar.answers import AnswerRules, answer_grammar
from forebay.grammar.lark import CallRule
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.answers.declared.declaration import declaration_of
from forebay.text.answers.reading import AnswerFormats
from tests.grammar.test_answers import SCHEMA, Vocabulary, read, tokens_of
from tests.text.answers.test_declared import CHANNELS, FALLBACKS, LANGUAGE, spec_of

MARKS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|im_end|>",
         "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|start|>", "<|channel>", "<channel|>",
         "<t>", "</t>", "<a>", "</a>", "<call "}  # fmt: skip
WRITTEN = (
    "object",
    "nested",
    "list",
    "channels",
    "dialect",
    "tags",
    "typed tags",
    "lines",
    "python",
    "late name",
    "no close",
)
SPECS: dict[str, dict[str, Any]] = {types[0]: spec for types, spec in FALLBACKS.items()}
SPECS |= {name: spec for name, spec, _ in LANGUAGE if name in WRITTEN}
CALLS = [CallRule("get_it", SCHEMA, True, "tools.0"), CallRule("get", {**SCHEMA, "required": []}, True, "tools.1")]
LINES = ("lines", "no close")
FREE = CallRule("free", {"$ref": "#/nowhere"}, False, "tools.1")


def formats_of(spec: dict[str, Any], known: Vocabulary) -> AnswerFormats:
    declared = declaration_of(spec, [piece for piece in known.pieces if len(piece) > 1])
    return AnswerFormats("declared", "declared" if declared.thinking else None, declared=declared)


@pytest.fixture(scope="module", params=["special", "text"])
def known(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(MARKS if request.param == "special" else set(), special=True)


@pytest.mark.parametrize("name", SPECS)
def test_declared_calls_that_are_enforced_are_what_their_tools_take(known: Vocabulary, name: str) -> None:
    if name == "channels" and not known.table.added("<|channel|>"):
        pytest.skip("text up to a marker that is no token has no end that chance finds")
    form = formats_of(SPECS[name], known)
    without = {"tags": ("last",), "qwen3_5": ("last",)}.get(name, ("last", "flags") if name in LINES else ())
    calls = [call._replace(parameters=_without(call.parameters, without)) for call in CALLS]
    tools = {call.name: call.parameters for call in calls}
    must = answer_grammar(form, known.table, AnswerRules(calls=calls, must_call=True))
    may = answer_grammar(form, known.table, AnswerRules(calls=calls))
    for seed in range(4):
        one = AnswerRules(calls=[calls[seed % 2]], must_call=True, one_call=True)
        text = known.said(answer_grammar(form, known.table, one), seed)
        ((tool, arguments),), said, _ = read(form, text, tools=tools)
        assert (tool, said) == (calls[seed % 2].name, "")
        jsonschema_rs.validate(tools[tool], arguments)
        for grammar in (must, may):
            assert known.matcher(grammar).consume_tokens(tokens_of(known, text))
    for tool, arguments in read(form, known.said(must, 5), tools=tools)[0]:
        jsonschema_rs.validate(tools[tool], arguments)
    assert known.matcher(must).try_consume_tokens(tokens_of(known, "It is 5.")) == 0


def _without(schema: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The schema without arguments of which several types may be a text, or of more than one line."""
    return {**schema, "properties": {key: own for key, own in schema["properties"].items() if key not in keys}}


def test_declared_calls_without_the_declaration_would_not_be_enforced() -> None:
    """The grammar is the declaration's: of the built-in formats none spells these calls."""
    known = Vocabulary(set(), special=True)
    call = {"function": {"name": "{content.n}", "arguments": "{content.a}"}}
    form = formats_of(spec_of({"open": "<<", "close": ">>", "content": "json", "transform": call}), known)
    grammar = answer_grammar(form, known.table, AnswerRules(calls=CALLS, must_call=True))
    for text, fits in (
        ('<<{"n": "get", "a": {}}>>', True),
        ('<<{"name": "get", "arguments": {}}>>', False),
        ('<<{"n": "get", "a": {"kind": 1}}>>', False),
    ):
        tokens = tokens_of(known, text)
        matcher = known.matcher(grammar)
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text


def test_declared_text_beside_enforced_calls_holds_no_other_call(known: Vocabulary) -> None:
    form = formats_of(SPECS["qwen2"], known)
    grammar = answer_grammar(form, known.table, AnswerRules(calls=[CALLS[1], FREE]))
    for text, fits in (
        ("<think>So </think>It is <b> 5.", True),
        ('Hi <tool_call>{"name": "get", "arguments": {}}</tool_call>', True),
        ('Hi <tool_call>{"name": "free", "arguments": {"x": [1]}}</tool_call>', True),
        ('Hi <tool_call>{"name": "get", "arguments": {"kind": 1}}</tool_call>', False),
        ("Hi <tool_call>none", False),
    ):
        tokens = tokens_of(known, text)
        assert (known.matcher(grammar).try_consume_tokens(tokens) == len(tokens)) == fits, text


def test_declared_form_of_content_is_enforced_in_its_region() -> None:
    known = Vocabulary(MARKS, special=True)
    form = formats_of(CHANNELS, known)
    content = Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [1, "x"]}')
    grammar = answer_grammar(form, known.table, AnswerRules(content=content, calls=CALLS))
    for text, fits in (
        ("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>1", True),
        ("<|channel|>final<|message|>2", False),
        ("1", False),
    ):
        tokens = tokens_of(known, text)
        assert (known.matcher(grammar).try_consume_tokens(tokens) == len(tokens)) == fits, text


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ({"open_pattern": r"\w+<t>", "content": "json", "transform": {"function": "{content}"}}, "no marker"),
        ({"open": "<t>", "close": "</t>", "transform": {"function": {"name": "find", "arguments": {"q": "{content}"}}}},
         "may not be called"),
        ({"open": "<t>", "content": "json", "transform": {"function": {"name": "{content.a.b}",
                                                                       "arguments": "{content.c}"}}}, "enforced"),
    ],
)  # fmt: skip
def test_declared_calls_that_cannot_be_enforced_are_refused(calls: dict[str, Any], why: str) -> None:
    known = Vocabulary(set(), special=True)
    with pytest.raises(InvalidRequest, match=why) as caught:
        answer_grammar(formats_of(spec_of(calls), known), known.table, AnswerRules(calls=CALLS, must_call=True))
    assert (caught.value.code, caught.value.param) == ("grammar_invalid", "tool_choice")


def test_declared_argument_of_several_types_is_refused_where_nothing_tells_them_apart() -> None:
    known = Vocabulary(set(), special=True)
    call = CallRule("get", {"properties": {"at": {"type": ["string", "integer"]}}}, True, "tools.0.function.parameters")
    tags = next(spec for name, spec, _ in LANGUAGE if name == "tags")
    with pytest.raises(InvalidRequest, match="at takes texts and other values"):
        answer_grammar(formats_of(tags, known), known.table, AnswerRules(calls=[call], must_call=True))
