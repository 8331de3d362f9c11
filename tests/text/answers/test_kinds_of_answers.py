"""The same questions, asked of every format: calls within the thinking, records that are no calls, types of texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.text.answers.argument_types import argument_type, texts_of
from forebay.text.answers.formats import CALL_FORMATS, THINK_TAGS
from forebay.text.answers.parts import CallArguments, CallBegun, Part, Said, Thought
from forebay.text.answers.reading import AnswerFormats, reader_for
from tests.text.answers.spellings import ANSWERS, SPELLINGS, TOOLS, Answer, Spelling

TAGGED = {name: spelling for name, spelling in SPELLINGS.items() if spelling.formats.thinking in THINK_TAGS}
MARKED = {name: each for name, each in TAGGED.items() if name not in ("llama3_json", "pythonic", "xlam")}
CALLED = Answer("", "I look.", (("search", '{"query": "x", "limit": 3}'), ("get_weather", '{"city": "Oslo"}')))


def _read(
    formats: AnswerFormats, pieces: list[str], *, opened: bool = False, tools: Any = TOOLS
) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = reader_for(formats, tools, opened=opened)
    parts: list[Part] = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] = arguments.get(part.call, "") + part.text
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    calls = [(name, json.loads(arguments.get(i, "null"))) for i, name in enumerate(names)]
    said, thought = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Said, Thought))
    return said, thought, calls


def _at_every_cut(
    formats: AnswerFormats, text: str, *, since: int = 1, **options: Any
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what is read of the text, which must be the same with a cut at any place from `since` on."""
    whole = _read(formats, [text], **options)
    assert _read(formats, list(text), **options) == whole
    for end in range(since, len(text)):
        assert _read(formats, [text[:end], text[end:]], **options) == whole
    return whole


def _unclosed(spelling: Spelling, answer: Answer) -> str:
    """What a model writes that forgets the tag behind its thinking."""
    tags = THINK_TAGS[spelling.formats.thinking or ""]
    return spelling.spell(answer).replace(tags.closes, "", 1)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_calls_in_unclosed_thinking_end_it(name: str, opened: bool) -> None:
    spelling = MARKED[name]
    tags = THINK_TAGS[spelling.formats.thinking or ""]
    text = _unclosed(spelling, CALLED)
    if opened:  # the prompt ends within the thinking
        text = text.removeprefix(tags.opens).removeprefix(tags.label)
    wanted = ("", "I look.", [(called, json.loads(arguments)) for called, arguments in CALLED.calls])
    assert _at_every_cut(spelling.formats, text, opened=opened) == wanted
    closed = f"{text}\n{tags.closes}\n\nDone."
    assert _at_every_cut(spelling.formats, closed, since=len(text) - 16, opened=opened)[1:] == wanted[1:]
    assert tags.closes not in _read(spelling.formats, [closed], opened=opened)[0]


@pytest.mark.parametrize("name", TAGGED)
def test_a_mark_in_the_thinking_that_no_call_follows_is_thought(name: str) -> None:
    spelling = TAGGED[name]
    form = spelling.formats.call_format
    assert form is not None
    for mark in (*form.begins, *form.own):
        thought = f"I could write {mark} here, but do not."
        text = spelling.spell(Answer("No.", thought))
        assert _at_every_cut(spelling.formats, text) == ("No.", thought, [])
    if len(THINK_TAGS[spelling.formats.thinking or ""].ends) > 1:
        return  # the head of the next message ends the thinking
    foreign = spelling.spell(Answer("No.", "As in X.", (("unknown_tool", '{"a": 1}'),)))
    told = THINK_TAGS[spelling.formats.thinking or ""].closes
    inside = foreign.replace(told, "", 1) + told
    assert _read(spelling.formats, [inside])[2] == []  # the call of a tool that does not exist is a thought


def test_reader_counts_tokens_of_a_call_in_the_thinking_as_no_thinking() -> None:
    reader = reader_for(AnswerFormats("hermes", "think"), TOOLS, opened=True)
    reader.push('Look.<tool_call>{"name": "search", "arguments": {')
    assert not reader.thinking


RECORDS = [
    '{"name": "search", "when": "today"}',
    '{"name": "search"}',
    '{"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}',
    '{"name": "search", "arguments": "of a kind"}',
    '{"name": "search", "parameters": 5}',
    '{"name": "search", "parameters": ["a"]}',
    '{"name": "Bob", "arguments": {}}',
]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("around", ["{}", "The entry is {} in the file.", "```json\n{}\n```", "[{}]"])
@pytest.mark.parametrize("name", ["llama3_json", "marked", "pythonic", "hermes"])
def test_a_record_in_text_is_said_character_for_character(name: str, around: str, record: str) -> None:
    text = around.replace("{}", record)
    assert _at_every_cut(SPELLINGS[name].formats, text) == (text, "", [])


OBJECTS = {
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "hunyuan": "<tool_calls>[{}]</tool_calls>",
    "nemotron": "<TOOLCALL>[{}]</TOOLCALL>",
    "mistral": "[TOOL_CALLS] [{}]",
    "gigachat3": "function call<|role_sep|>\n{}<|message_sep|>",
    "llama3_json": "<|python_tag|>{}",
    "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_behind_a_mark_is_a_call_if_it_has_arguments_or_a_name_alone(name: str) -> None:
    def calls(written: str) -> list[tuple[str, Any]]:
        said, _, found = _at_every_cut(AnswerFormats(name, None), OBJECTS[name].replace("{}", written))
        assert not (found and said)
        return found

    assert calls('{"name": "search"}') == [("search", {})]
    assert calls('{"name": "search", "arguments": null}') == [("search", {})]
    assert calls('{"name": "search", "arguments": "{\\"limit\\": 3}"}') == [("search", {"limit": 3})]
    assert calls('{"arguments": "{\\"limit\\": 3}", "name": "search", "id": "x"}') == [("search", {"limit": 3})]
    assert calls('{"name": "search", "when": "today"}') == []


TEXTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["string"]},
    {"const": "1"},
    {"enum": ["1", "2"]},
    {"$ref": "#/$defs/Unit"},
    {"$ref": "#/definitions/Unit"},
    {"$ref": "#/properties/other"},
    {"$ref": "#/$defs/Chain"},
    {"allOf": [{"$ref": "#/$defs/Unit"}]},
    {"allOf": [{"$ref": "#/$defs/Unit"}], "description": "x", "default": "1"},
    {"allOf": [{"type": "string"}, {"minLength": 1}]},
    {"type": "string", "allOf": [{"enum": ["1"]}]},
    {"anyOf": [{"const": "1"}, {"const": "2"}]},
    {"oneOf": [{"$ref": "#/$defs/Unit"}, {"type": "string"}]},
    {"anyOf": [{"allOf": [{"$ref": "#/$defs/Unit"}]}]},
    {"pattern": "^[0-9]+$"},
    {"format": "date"},
    {"minLength": 1},
    {"type": ["string", "integer"], "enum": ["1", "2"]},
]
NULLABLE: list[dict[str, Any]] = [
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
    {"allOf": [{"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}]},
    {"enum": ["1", None]},
    {"$ref": "#/$defs/Maybe"},
]
OTHERS: list[Any] = [
    {},
    True,
    5,
    {"type": "any"},
    {"type": ["string", "integer"]},
    {"enum": ["1", 2]},
    {"const": 1},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "string"}, {}]},
    {"allOf": [{"$ref": "#/$defs/Loop"}]},
    {"$ref": "#/$defs/Missing"},
    {"$ref": "other.json#/x"},
    {"type": "null"},
]
DEFINED = {
    "$defs": {
        "Unit": {"type": "string", "enum": ["1", "2"]},
        "Chain": {"$ref": "#/$defs/Unit"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}]},
    },
    "definitions": {"Unit": {"type": "string"}},
}


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "object", **DEFINED, "properties": {"at": schema, "other": {"type": "string"}}}


def test_argument_type_is_a_text_through_every_word_that_says_so() -> None:
    kinds = [(argument_type(_tool(schema), "at"), schema) for schema in (*TEXTS, *NULLABLE, *OTHERS)]
    assert [schema for kind, schema in kinds if kind.text and not kind.nullable] == TEXTS
    assert [schema for kind, schema in kinds if kind.text and kind.nullable] == NULLABLE
    places: list[Any] = [
        {"additionalProperties": {"type": "string"}},
        {"allOf": [{"properties": {"at": {"type": "string"}}}]},
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"at": {"const": "1"}}}}},
        {"anyOf": [{"properties": {"at": {"const": "1"}}}, {"properties": {"at": {"const": "2"}}}]},
    ]
    assert all(argument_type(tool, "at").text for tool in places)
    none: list[Any] = [
        5,
        None,
        {},
        {"properties": 5},
        {"properties": {"at": {"anyOf": 5}}},
        {"additionalProperties": True},
    ]
    assert not any(argument_type(tool, "at").text for tool in none)


def test_texts_of_a_schema_are_those_of_all_its_parts() -> None:
    def texts(schema: dict[str, Any]) -> list[str] | None:
        return texts_of(schema, _tool(schema))

    assert texts({"allOf": [{"$ref": "#/$defs/Unit"}, {"enum": ["2", "3"]}]}) == ["2"]
    assert texts({"anyOf": [{"const": "a"}, {"type": "null"}, {"$ref": "#/$defs/Unit"}]}) == ["a", "1", "2"]
    assert texts({"type": "string", "anyOf": [{"const": "a"}, {"type": "string"}]}) is None
    assert texts({"allOf": [{"type": "string"}]}) is None


TAGS = ["qwen3_coder", "mimo", "seed_oss", "minimax_m2", "glm45", "gemma4"]


@pytest.mark.parametrize("name", TAGS)
def test_values_of_texts_stay_texts_and_null_is_null_where_it_may_be(name: str) -> None:
    bare = {"gemma4": "<|tool_call>call:f{{at:{}}}<tool_call|>"}
    spelled = SPELLINGS[name].spell(Answer(calls=(("f", '{"at": "VALUE"}'),)))
    text = bare[name].replace("{{", "{").replace("}}", "}").replace("{}", "VALUE") if name in bare else spelled
    for schemas, null in ((TEXTS, "null"), (NULLABLE, None)):
        for schema in schemas:
            for value, wanted in (("1", "1"), ("null", null), ("true", "true"), ("nullable", "nullable"), ("", "")):
                tools = {"f": _tool(schema)}
                _, _, calls = _read(AnswerFormats(name, None), list(text.replace("VALUE", value)), tools=tools)
                assert calls == [("f", {"at": wanted})], (schema, value)


GEMMA = [
    ('{at:<|"|>a <|"|>b<|"|> c<|"|>}', {"at": 'a "b" c'}),
    ('{at:["a", <|"|>b<|"|>, c]}', {"at": ["a", "b", "c"]}),
    ('{"at": {"k": "v", n: [1, {x: null}]}}', {"at": {"k": "v", "n": [1, {"x": None}]}}),
    ('{<|"|>at<|"|>:<|"|>x<|"|> , other:1.5}', {"at": "x", "other": 1.5}),
    ("{at:True,other:None}", {"at": True, "other": None}),
    ("{}", {}),
    ("{at:-3,b:new york}", {"at": -3, "b": "new york"}),
    ('{at:[1,[2,{k:<|"|>}<|"|>}]]', {"at": [1, [2, {"k": "}"}]]}),
]


@pytest.mark.parametrize(("written", "wanted"), GEMMA)
def test_gemma4_values_are_read_as_templates_and_models_write_them(written: str, wanted: dict[str, Any]) -> None:
    text = f"Look.<|tool_call>call:free{written}<tool_call|>"
    assert _at_every_cut(AnswerFormats("gemma4", None), text, tools={"free": {}}) == ("Look.", "", [("free", wanted)])


def test_no_format_leaves_a_mark_of_its_calls_in_the_text() -> None:
    """Also of calls that follow text, and with text behind them."""
    for name, spelling in SPELLINGS.items():
        if spelling.formats.calls not in CALL_FORMATS:
            continue
        for answer in ANSWERS:
            if not answer.calls:
                continue
            said, thought, _ = _read(spelling.formats, [spelling.spell(answer) + "\n"])
            marks = [mark for mark in spelling.formats.spellings if len(mark) > 3 and mark in said + thought]
            assert not marks, (name, marks)
