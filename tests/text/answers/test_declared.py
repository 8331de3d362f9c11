"""Formats that checkpoints declare are read as transformers reads them, in time linear in the text."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import regex
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as FALLBACKS
from transformers.utils.chat_parsing import ResponseParser, parse_response

from forebay.text.answers.cursor import Cursor, Reading
from forebay.text.answers.declared import patterns
from forebay.text.answers.declared.declaration import Declaration, DeclarationError, declaration_of
from forebay.text.answers.declared.patterns import Pattern, Patterns, find
from forebay.text.answers.declared.reading import region_begun
from forebay.text.answers.declared.trees import PatternError, parsed, runs
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Said, Thought
from forebay.text.answers.probes import find_formats
from forebay.text.answers.reading import AnswerFormats, reader_for
from tests.text.answers.templates import QWEN3, QWEN3_CODER
from tests.text.in_process import templates_in_this_process
from tests.text.tiny_tokenizer import tiny_tokenizer

TOOLS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "deep": {"type": "boolean"},
            "near": {"type": "object"},
            "tags": {"type": "array"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
GIVEN = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]


class Message(NamedTuple):
    said: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@cache
def _declared(spec: str) -> Declaration:
    return declaration_of(json.loads(spec))


def ours(spec: dict[str, Any], pieces: list[str], tools: Any = TOOLS, opened: Any = False) -> Message:
    formats = AnswerFormats("declared", "declared", declared=_declared(json.dumps(spec)))
    reader = reader_for(formats, tools, opened=opened)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    assert len(names) == sum(isinstance(part, CallEnded) for part in parts)
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    said, thought = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Said, Thought))
    return Message(
        said.strip(), thought, tuple((name, json.loads(text)) for name, text in zip(names, arguments, strict=True))
    )


def theirs(spec: dict[str, Any], text: str, tools: Any = GIVEN, prefix: str = "") -> Message:
    found = parse_response(text, spec, prefix=prefix, tools=tools)
    calls = [call["function"] for call in found.get("tool_calls", [])]
    thought = next((found[name] for name in ("reasoning_content", "thinking") if name in found), "")
    return Message(found.get("content", ""), thought, tuple((call["name"], call["arguments"]) for call in calls))


def check(spec: dict[str, Any], text: str, rng: random.Random, *, everywhere: bool = False) -> Message:
    """Read as transformers reads it: whole, in characters, and cut in pieces at random places or in two at each."""
    wanted = theirs(spec, text)
    for pieces in ([text], list(text), _cut(text, rng)):
        assert ours(spec, pieces) == wanted, pieces
    for at in range(1, len(text)) if everywhere else ():
        assert ours(spec, [text[:at], text[at:]]) == wanted
    return wanted


def _cut(text: str, rng: random.Random) -> list[str]:
    places = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(len(text) // 4))})
    return [text[begin:end] for begin, end in pairwise(places)]


# -- transformers' own table -------------------------------------------------------------------------------------------


def _qwen(message: Message) -> str:
    thought = f"<think>\n{message.thought}\n</think>\n\n" if message.thought else ""
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in message.calls
    ]
    return thought + message.said + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls) + "<|im_end|>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen35(message: Message) -> str:
    thought = f"<think>\n{message.thought}\n</think>\n\n" if message.thought else ""
    calls = []
    for name, arguments in message.calls:
        inside = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        calls.append(f"\n\n<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>")
    return thought + message.said + "".join(calls) + "<|im_end|>\n<|endoftext|>"


def _gemma(message: Message) -> str:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return f'<|"|>{each}<|"|>'
        if isinstance(each, dict):
            return "{" + ",".join(f"{key}:{value(inside)}" for key, inside in each.items()) + "}"
        return f"[{','.join(map(value, each))}]" if isinstance(each, list) else json.dumps(each)

    thought = f"<|channel>thought\n{message.thought}<channel|>" if message.thought else ""
    calls = "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in message.calls)
    return thought + message.said + calls + ("<|tool_response>" if calls else "<turn|>")


WRITERS: dict[str, Callable[[Message], str]] = {"qwen3": _qwen, "qwen3_5": _qwen35, "gemma4": _gemma}
WORDS = [
    "Oslo",
    "é",
    "你好",
    "a<b",
    "{x}",
    "5",
    "true",
    "\n",
    "it's",
    '"',
    "</p",
    "\\",
    "[1]",
    "<tool",
    "null",
    "🙂",
    ":",
]


def _words(rng: random.Random, least: int = 0) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(least, 7))).strip()


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind == 4:
        return {rng.choice("abc"): _value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return [_words(rng), rng.randrange(-5, 99), rng.random() < 0.5, None][kind]


def _message(rng: random.Random) -> Message:
    def arguments() -> dict[str, Any]:
        all_of = {
            "query": f"x {_words(rng)}".strip(),
            "limit": rng.randrange(99),
            "deep": rng.random() < 0.5,
            "near": {"at": _value(rng)},
            "tags": [_value(rng)],
        }
        return {key: all_of[key] for key in rng.sample(list(all_of), rng.randrange(6))}

    calls = tuple(("find", arguments()) if rng.random() < 0.8 else ("stop", {}) for _ in range(rng.randrange(3)))
    return Message(
        "So. " + _words(rng) if rng.random() < 0.7 else "", _words(rng, 1) if rng.random() < 0.6 else "", calls
    )


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("types", FALLBACKS, ids=[types[0] for types in FALLBACKS])
def test_declared_known_template_of_transformers_random_messages_agree(types: tuple[str, ...]) -> None:
    write = next(writer for name, writer in WRITERS.items() if name in types)
    spec, rng = FALLBACKS[types], random.Random(types[0])
    for _ in range(25):
        message = _message(rng)
        assert check(spec, write(message), rng).calls == message.calls


# -- the language ------------------------------------------------------------------------------------------------------


def spec_of(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    shown = {"content": {"close": "<end>"}, **fields}
    return {"start_anchor": "<begin>", "fields": {"tool_calls": {"repeats": True, **calls}, **shown}}


CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
EACH = {"function": {"name": "{tool_name}", "arguments": "{parameters}"}}
TAG = r"<p k=(?P<key>\w+)>(?P<value>.*?)</p>"
LAX = {"name": "json", "args": {"allow_non_json": True}}
NAMED = {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "transform": CALL}
CHANNELS = {
    "start_anchor_pattern": r"<\|start\|>assistant(?!\w)",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": " + "},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>", "repeats": True, "content": "json", "transform": CALL,
        },
    },
}  # fmt: skip
LANGUAGE: list[tuple[str, dict[str, Any], str]] = [
    ("object", spec_of({"open": "<t>", "close": "</t>", "content": "json", "transform": {"function": "{content}"}}),
     'Hi <t>{"arguments": {"query": "}"}, "name": "find"}</t><t> {"name": "stop", "arguments": {}} </t><end>'),
    ("nested", spec_of({"open": ["<t>", "<t2>"], "close": "</t>", "content": "json"}),
     'Hi <t2>{"id": 1, "function": {"name": "find", "arguments": {"limit": 3}}}</t>'),
    ("paths", spec_of({"open": "<t>", "close": "</t>", "content": "json",
                       "transform": {"function": {"name": "{content.tool.id}", "arguments": "{content.with}"}}}),
     '<t>{"with": {"query": "a"}, "tool": {"id": "find"}}</t>'),
    ("list", spec_of({"open": "<a>", "close": "</a>", "content": "json", "repeats": False, "transform_each": True,
                      "transform": EACH}),
     'Hi<a>[\n{"tool_call_id": "0", "tool_name": "find", "parameters": {"limit": 3}}, '
     '{"tool_name": "stop", "parameters": {}}\n]</a>'),
    ("channels", CHANNELS,
     '<|channel|>analysis<|message|>hm <|end|><|start|>assistant<|channel|>analysis<|message|>well<|end|>'
     '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"limit": 3}<|call|>'),
    ("said in a channel", CHANNELS,
     "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|> Yes <x> <|return|>"),
    ("dialect", spec_of({**NAMED, "content": "json",
                         "content_args": {"unquoted_keys": True, "string_delims": [["«", "»"], ["|", "|"]]}}),
     '<call find>{query: «a, b: "c"», near: {x: |y|, "k": [1, true, null]}}</call>'),
    ("tags", spec_of({**NAMED, "content": "xml-inline", "content_args": {"tag_pattern": TAG}}),
     "Hi <call find>\n<p k=query> a < b </p> <p k=limit>7</p><p k=deep>True</p>\n</call><call stop></call>"),
    ("typed tags", spec_of({**NAMED, "content": "xml-inline",
                            "content_args": {"tag_pattern": TAG, "value_parser": LAX, "merge_duplicates": True}}),
     '<call find><p k=query>a</p><p k=tags>1</p><p k=tags>{"x": "y"}</p><p k=limit>"7"</p><p k=no> b </p></call>'),
    ("numbers", spec_of({**NAMED, "content": "xml-inline",
                         "content_args": {"tag_pattern": TAG, "value_parser": {"name": "int"}}}),
     "<call find><p k=limit> 07 </p></call>"),
    ("lines", spec_of({**NAMED, "content": "kv-lines"}),
     "Hi <call find>query: a: b\n\nno pair\n limit : 7\ndeep:false</call>"),
    ("other lines", spec_of({**NAMED, "content": "kv-lines",
                             "content_args": {"line_sep": ";", "kv_sep": "=>", "value_parser": LAX}}),
     '<call find>near=>{"a": "b"};query=>x y;tags=>[1]</call>'),
    ("python", spec_of({"open": "<py>", "close": "</py>", "content": "python-call-list", "repeats": False,
                        "transform_each": True,
                        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}}}),
     "<py>[find(query='a', limit=3, near={'x': [None, True]}), stop()]</py>"),
    ("late name", spec_of({"open": "<t>", "close_pattern": r"</t for=(?P<name>\w+)>", "content": "json",
                           "transform": CALL}), 'Hi <t>{"limit": 3}</t for=find>'),
    ("code", spec_of({"open": "```run\n", "close": "```",
                      "transform": {"function": {"name": "find", "arguments": {"query": "{content}", "limit": 1}}}}),
     'Hi ```run\nprint("x")\n```'),
    ("no close", spec_of({"open_pattern": r"<call (?P<name>\w+)>", "content": "kv-lines", "transform": CALL}),
     "Hi <call find>query: a\nlimit: 2"),
    ("lookahead", spec_of({"open": "<t>", "close_pattern": r"(?=<t>|<end>)|$", "content": "json",
                           "transform": {"function": "{content}"}}),
     '<t>{"name": "stop", "arguments": {}}<t>{"name": "find", "arguments": {"limit": 1}}<end>'),
    ("marks within marks", spec_of({"open": "<t>", "close": "</t>", "content": "json",
                                    "transform": {"function": "{content}"}},
                                   thinking={"open": "<<t>>", "close": "<</t>>"}),
     '<<t>>hm<</t>><t>{"name": "find", "arguments": {"limit": 3}}</t>'),
]  # fmt: skip


@pytest.mark.quick(9)
@pytest.mark.parametrize(("spec", "text"), [case[1:] for case in LANGUAGE], ids=[case[0] for case in LANGUAGE])
def test_declared_language_agrees_with_transformers_at_each_split(spec: dict[str, Any], text: str) -> None:
    found = check(spec, text, random.Random(3), everywhere=True)
    assert found.calls or found.said
    for end in range(len(text)):  # what is cut off is read, however it came
        assert _kinds(spec, [text[:end]]) == _kinds(spec, list(text[:end]))


def _kinds(spec: dict[str, Any], pieces: list[str]) -> list[tuple[str, str]]:
    reader = reader_for(AnswerFormats("declared", "declared", declared=_declared(json.dumps(spec))), TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    found: list[tuple[str, str]] = []
    for part in parts:
        kind, text = type(part).__name__, getattr(part, "text", getattr(part, "name", ""))
        if found and found[-1][0] == kind:
            text, _ = found[-1][1] + text, found.pop()
        found.append((kind, text))
    return found


OTHER_WORDS = [
    *(
        "find",
        '{"name": "find", "arguments": {"query": "x"}}',
        '{"limit": 3}',
        "query",
        "<p k=query>",
        "</p>",
        "call find>",
    ),
    *'{}["\n :;()<«7',
    "=>",
    "<parameter=query>",
]


def test_declared_random_texts_of_markers_are_read_the_same_at_any_split() -> None:
    rng = random.Random(11)
    for spec in (*FALLBACKS.values(), *(case[1] for case in LANGUAGE)):
        bounds = [bound for region in _declared(json.dumps(spec)).regions for bound in (region.opens, region.closes)]
        words = [*(run for bound in bounds if bound is not None for run in runs(bound.tree)), *OTHER_WORDS]
        for _ in range(20):
            text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 14)))
            whole = _kinds(spec, [text])
            assert _kinds(spec, list(text)) == whole, text
            assert _kinds(spec, _cut(text, rng)) == whole, text


@pytest.mark.parametrize(
    "text",
    ["<t>none</t>", '<t>{"a": 1}</t> x', "a <t", "<t><t>[1]</t>", '<t>{"name": 3, "arguments": {}}</t>', "<call f g>"],
)
def test_declared_text_that_only_resembles_a_call_stays_text(text: str) -> None:
    for spec in (LANGUAGE[0][1], LANGUAGE[1][1], LANGUAGE[2][1]):
        for pieces in ([text], list(text)):
            assert ours(spec, pieces) == Message(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, '<t>{"name": "find", "arguments": ARGUMENTS}</t>'),
        (2, '<t>{"with": ARGUMENTS, "tool": {"id": "find"}}</t>'),
        (4, "<|channel|>commentary to=functions.find<|message|>ARGUMENTS<|call|>"),
        (13, "<t>ARGUMENTS</t for=find>"),
    ],
)
def test_declared_arguments_are_copied_character_for_character(number: int, text: str) -> None:
    wanted = '{"query":"\\u00e9\\/",  "limit": 1.50e0 }'
    reader = reader_for(AnswerFormats("declared", None, declared=_declared(json.dumps(LANGUAGE[number][1]))), TOOLS)
    parts = reader.push(text.replace("ARGUMENTS", wanted)) + reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == wanted


def test_declared_answer_without_tools_or_with_thinking_said_keeps_its_text() -> None:
    spec = FALLBACKS[next(iter(FALLBACKS))]
    text = "<think>\nhm\n</think>\n\nHi <tool_call>\n{}\n</tool_call>"
    formats = AnswerFormats("declared", "declared", declared=declaration_of(spec))
    assert ours(spec, [text], tools=None) == Message("Hi <tool_call>\n{}\n</tool_call>", "hm")
    reader = reader_for(formats.with_thinking_said, None)
    assert "".join(part.text for part in reader.push(text) + reader.finish() if isinstance(part, Said)) == text


def test_declared_call_within_the_thinking_ends_it_and_a_second_close_is_text() -> None:
    spec = FALLBACKS[next(iter(FALLBACKS))]
    called = '<think>\nhm <tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert ours(spec, list(called)) == Message("", "hm", (("stop", {}),))
    unknown = '<think>a <tool_call>{"name": "other", "arguments": {}}</tool_call> b</think>c</think>'
    assert ours(spec, list(unknown)) == Message(
        "c</think>", 'a <tool_call>{"name": "other", "arguments": {}}</tool_call> b'
    )


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("<|start|>assistant<|channel|>final<|message|>old<|end|><|start|>assistant", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "thinking"),
        ("x<|start|>assistant<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>Al", "content"),
    ],
)
def test_declared_region_that_the_prompt_opened_goes_on(prefix: str, name: str | None) -> None:
    begun = region_begun(_declared(json.dumps(CHANNELS)), prefix)
    assert (begun.name if begun else None) == name
    text = "so.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    parser = ResponseParser(CHANNELS, prefix=prefix)
    events = [*parser.feed(text), *parser.finalize()[1]]
    chunks = {name: "".join(e["text"] for e in events if e["type"] == "region_chunk" and e["field"] == name)
              for name in ("thinking", "content")}  # fmt: skip
    found = ours(CHANNELS, [text], opened=begun or False)
    assert (found.said, found.thought) == (chunks["content"], chunks["thinking"])


# -- declarations that are not believed --------------------------------------------------------------------------------

MALFORMED: list[tuple[Any, str]] = [
    ("text", "it is str"),
    ({"fields": {}}, "fields must be"),
    ({"fields": {"content": {}}}, "neither start_anchor"),
    ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "fields without open"),
    ({"start_anchor": "a", "version": 2, "fields": {"content": {}}}, "version"),
    ({"start_anchor": "a", "regexes": 1, "fields": {"content": {}}}, "unknown keys: regexes"),
    ({"start_anchor": "a", "fields": {"content": {"opens": "x"}}}, "unknown keys: opens"),
    ({"start_anchor": "a", "fields": {"content": {"open": "x", "open_pattern": "x"}}}, "both open and"),
    ({"start_anchor": "a", "fields": {"content": {"open": ""}}}, "open must be texts"),
    ({"start_anchor": "a", "fields": {"content": {"open": ["x"] * 65}}}, "open must be"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "x*"}}}, "matches the empty text"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "(x"}}}, "bracket is missing"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": r"(a)\1"}}}, "not supported"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "(?<=x)a"}}}, "not supported"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "a(?=.*b)"}}}, "unlimited length"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "((a{9}){9}){9}"}}}, "instructions"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "a" * 3000}}}, "3000 characters"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "(" * 99 + ")" * 99}}}, "nested more"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "[z-a]"}}}, "class"),
    ({"start_anchor": "a", "fields": {"content": {"open_pattern": "(?P<n>x)"}}}, "no transform"),
    ({"start_anchor": "a", "fields": {"content": {"content": "yaml"}}}, "'yaml' is not known"),
    ({"start_anchor": "a", "fields": {"content": {"join": " "}}}, "needs repeats"),
    (spec_of({"open": "<t>", "content": "xml-inline"}), "tag_pattern is not a text"),
    (spec_of({"open": "<t>", "content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>a)"}}), "group value"),
    (spec_of({"open": "<t>", "content": "json", "transform": {"function": {"name": "f {content}"}}}), "mixes"),
    (spec_of({"open": "<t>", "content": "json", "transform": {"function": {"name": "{who}"}}}), "called 'who'"),
    (spec_of({"open": "<t>", "content": "json", "transform": {"function": {}}}), "no call with a name"),
    (spec_of({"open": "<t>", "content": "json", "transform": [[[[[[[[[["x"]]]]]]]]]]}), "nested more"),
]


@pytest.mark.parametrize(("spec", "why"), MALFORMED, ids=[why for _, why in MALFORMED])
def test_declaration_malformed_is_refused_with_the_reason(spec: Any, why: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(why)):
        declaration_of(spec)


@pytest.fixture
def in_this_process() -> Iterator[None]:
    with templates_in_this_process():
        yield


def test_find_formats_declaration_comes_before_the_probes(
    in_this_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer(600, QWEN3)
    tokenizer.response_template = FALLBACKS[next(iter(FALLBACKS))]
    found = find_formats(tokenizer)
    assert (found.formats.calls, found.formats.thinking) == ("declared", "declared")
    assert all("response_template" in found.evidence[part] for part in ("tool_calls", "reasoning"))
    assert (found.ignores_tools, found.calls.hidden, found.variables) == (False, False, {"enable_thinking"})
    assert found.opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not found.opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    off = find_formats(tokenizer, thinking="none").formats
    assert (off.calls, off.thinking) == ("declared", None)
    assert find_formats(tokenizer, calls="hermes").formats == AnswerFormats("hermes", "think")


def test_find_formats_malformed_declaration_is_one_log_line_and_the_probes_decide(
    in_this_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tokenizer = tiny_tokenizer(600, QWEN3)
    for spec, why in [(MALFORMED[1][0], "fields must be"), (spec_of({"open": "<t>", "content": "yaml"}), "yaml")]:
        caplog.clear()
        tokenizer.response_template = spec
        assert find_formats(tokenizer).formats == AnswerFormats("hermes", "think")
        (line,) = [record.getMessage() for record in caplog.records if "response_template" in record.getMessage()]
        assert why in line


# -- patterns ----------------------------------------------------------------------------------------------------------

ATOMS = ["a", "b", "<", " ", r"\s*", r"[^>a]+", r"\w+", ".*?", ".*", "(?P<n>[ab]+)", "(?:a|ab)", "(?:ab|a)b?", "<a>",
         "(?=b)", "(?!a)", r"\b", "$", r"\Z", "a{1,2}", "(?:b*a)+", "^", "x??", r"\x61", "[ab-]{2}"]  # fmt: skip


def _found(source: str, pieces: list[str]) -> list[Any]:
    looked, cursor, found = Patterns(Pattern(parsed(source))), Cursor(), list[Any]()

    def read() -> Reading[None]:
        while True:
            before: list[str] = []
            match = yield from find(cursor, looked, before.append)
            found.append("".join(before))
            if match is None:
                return
            found.append((match.text, dict(match.groups)))

    program = read()
    next(program, None)
    for piece in pieces:
        cursor.feed(piece)
        next(program, None)
    cursor.ended = True
    next(program, None)
    return found


def test_patterns_find_what_regex_finds_however_the_text_comes() -> None:
    rng, checked = random.Random(1), 0
    while checked < 400:
        source = "".join(rng.choice(ATOMS) for _ in range(rng.randrange(1, 5)))
        try:
            tree = parsed(source)
            Pattern(tree)
        except PatternError:
            continue
        text = "".join(rng.choice("ab<> x") for _ in range(rng.randrange(14)))
        if source.count("?P<n>") > 1:
            continue
        wanted: list[Any] = []
        at = 0
        for match in regex.finditer(source, text, regex.DOTALL):
            wanted += [
                text[at : match.start()],
                (match[0], {k: v for k, v in match.groupdict().items() if v is not None}),
            ]
            at = match.end()
        if any(isinstance(each, tuple) and not each[0] for each in wanted):
            continue  # empty matches are of no use here
        checked += 1
        wanted.append(text[at:])
        assert _found(source, [text]) == _found(source, list(text)) == wanted, (source, text)


HOSTILE = [r"(a+)+b", r"(?:a|aa|a?)*c", r"\s*\s*\s*x", r"a.*a.*a.*z", r"(?:a{0,9}){9}b"]


@pytest.mark.parametrize("source", HOSTILE)
def test_patterns_take_linear_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in instructions that a character is offered to."""
    steps, consume = 0, patterns._Search.consume

    def counted(search: Any, char: str, place: int) -> None:
        nonlocal steps
        steps += 1 + len(search.threads)
        consume(search, char, place)

    monkeypatch.setattr(patterns._Search, "consume", counted)
    counts = []
    for times in (600, 1200):
        steps = 0
        _found(source, ["a " * times])
        counts.append(steps)
    assert counts[1] <= 2.2 * counts[0]


def test_declared_calls_that_fail_again_and_again_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, take = 0, Cursor.take

    def counted(cursor: Cursor, count: int) -> str:
        nonlocal steps
        steps += count
        return take(cursor, count)

    monkeypatch.setattr(Cursor, "take", counted)
    spec = spec_of({"open": "{", "content": "json", "transform": {"function": "{content.x}"}})
    counts = []
    for times in (2000, 4000):
        steps = 0
        assert ours(spec, ["{[" * times]).calls == ()
        counts.append(steps)
    assert counts[1] <= 2.2 * counts[0]


def test_find_formats_declared_calls_that_the_template_never_shows_are_set_aside(in_this_process: None) -> None:
    """A model that the template tells nothing of tools is told of Hermes' form, and so it is read."""
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = LANGUAGE[0][1]
    assert find_formats(tokenizer).formats.calls == "hermes"
    tokenizer = tiny_tokenizer(600, QWEN3_CODER)
    tokenizer.response_template = FALLBACKS[next(key for key in FALLBACKS if "qwen3_5" in key)]
    assert find_formats(tokenizer).formats.calls == "declared"
