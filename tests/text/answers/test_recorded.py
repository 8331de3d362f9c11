"""Outputs of the kinds that other engines' parsers accept are read as the same calls, however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Said
from forebay.text.answers.reading import AnswerFormats, reader_for

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "$defs": {"Unit": {"type": "string", "enum": ["1", "2"]}},
        "properties": {"city": {"type": "string"}, "state": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
    },
    "area": {
        "type": "object",
        "properties": {"shape": {"type": "string"}, "size": {"type": "object"}, "digits": {"type": "integer"}},
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
}
Calls = list[tuple[str, dict[str, Any]]]


def _read(form: str, pieces: list[str]) -> tuple[str, Calls]:
    reader = reader_for(AnswerFormats(form, None), TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert sum(isinstance(part, CallEnded) for part in parts) == sum(isinstance(part, CallBegun) for part in parts)
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    said = "".join(part.text for part in parts if isinstance(part, Said))
    return said, list(zip(names, map(json.loads, arguments), strict=True))


def _check(form: str, text: str, said: str, calls: Calls) -> None:
    """Whole, in characters, cut in two anywhere, and in pieces of every small size."""
    assert _read(form, [text]) == (said, calls)
    assert _read(form, list(text)) == (said, calls)
    for end in range(1, len(text)):
        assert _read(form, [text[:end], text[end:]]) == (said, calls)
    for size in (2, 3, 7):
        places = [*range(0, len(text), size), len(text)]
        assert _read(form, [text[begin:end] for begin, end in pairwise(places)]) == (said, calls)


DALLAS = {"city": "Dallas", "state": "TX"}
CITY, STATE = "<parameter=city>\nDallas\n</parameter>\n", "<parameter=state>\nTX\n</parameter>\n"
QWEN3_CODER: list[tuple[str, str, Calls]] = [
    (f"<function=weather>\n{CITY}{STATE}</function>", "", [("weather", DALLAS)]),
    (f"I look.\n\n<function=weather>\n{CITY}{STATE}</function>\n</tool_call>", "I look.\n\n", [("weather", DALLAS)]),
    (
        f"<tool_call>\n<function=weather>\n<parameter=city>\nDallas\n{STATE}</function>\n</tool_call>",
        "",
        [("weather", DALLAS)],
    ),
    (
        f"<tool_call>\n<function=weather>\n{CITY}<parameter=state>\nTX\n</function>\n</tool_call>",
        "",
        [("weather", DALLAS)],
    ),
    (
        f"<tool_call>\n<function=weather>\n{CITY}</function>\n<function=search>\n</function>\n</tool_call>",
        "",
        [("weather", {"city": "Dallas"}), ("search", {})],
    ),
    (
        "<tool_call>\n<function=area>\n<parameter=size>\n{'width': 10,\n 'deep': [True, None]}\n</parameter>\n"
        '<parameter=digits>\n2\n</parameter>\n<parameter=shape>\n{"a": 1}\n</parameter>\n</function>\n</tool_call>',
        "",
        [("area", {"size": {"width": 10, "deep": [True, None]}, "digits": 2, "shape": '{"a": 1}'})],
    ),
    (
        "<tool_call>\n<function=weather>\n<parameter=unit>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", {"unit": "1"})],
    ),
    ("Use <function=other>, or <function=weather", "Use <function=other>, or <function=weather", []),
]
GLM45: list[tuple[str, str, Calls]] = [
    (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Dallas<arg_key>state</arg_key>\n<arg_value>TX"
        "</arg_value>\n</tool_call>",
        "",
        [("weather", DALLAS)],
    ),
]
MINIMAX_M2: list[tuple[str, str, Calls]] = [
    (
        'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Dallas</parameter>\n'
        '<parameter name="state">TX</parameter>\n</invoke>\n<invoke name="search">\n<parameter name="limit">3'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "I look.\n",
        [("weather", DALLAS), ("search", {"limit": 3})],
    ),
    (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Dallas\n<parameter name="state">TX'
        "</invoke>",
        "",
        [("weather", {"city": "Dallas\n", "state": "TX"})],
    ),
    ('Use <invoke name="other">, or <invoke', 'Use <invoke name="other">, or <invoke', []),
]
LFM2: list[tuple[str, str, Calls]] = [
    (
        '<|tool_call_start|>{"name": "search", "arguments": {"limit": 3}}<|tool_call_end|>Done.',
        "Done.",
        [("search", {"limit": 3})],
    ),
    (
        '<|tool_call_start|>[\n  {"name": "search", "arguments": {}}\n]<|tool_call_end|>',
        "",
        [("search", {})],
    ),
    (
        "<|tool_call_start|> [search(query='x', limit=07)]<|tool_call_end|>\nI search.",
        "\nI search.",
        [("search", {"query": "x", "limit": 7})],
    ),
]
MISTRAL: list[tuple[str, str, Calls]] = [
    ('[TOOL_CALLS]search{"query": "a {b} [ARGS]"}', "", [("search", {"query": "a {b} [ARGS]"})]),
    ('So: [TOOL_CALLS]search[ARGS]{"limit": 1}', "So: ", [("search", {"limit": 1})]),
    (
        '[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{"limit": 1}[TOOL_CALLS]search {"limit": 2}',
        "",
        [("search", {"limit": 1}), ("search", {"limit": 2})],
    ),
    (
        '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "[x] - [y]"}}]',
        "",
        [("search", {"query": "[x] - [y]"})],
    ),
]
LLAMA: list[tuple[str, str, Calls]] = [
    (
        'Here it is: {"name": "search", "parameters": {}} Do you want more?',
        "Here it is:  Do you want more?",
        [("search", {})],
    ),
    (
        'Two: {"name": "search", "parameters": {"limit": 1}} ; {"name": "area", "parameters": {}} and {area} too.',
        "Two:  and {area} too.",
        [("search", {"limit": 1}), ("area", {})],
    ),
    ('In C {"name": "Bob"} or {"query": {"name": "x"}}, {', 'In C {"name": "Bob"} or {"query": {"name": "x"}}, {', []),
    ('{"name": "search", "arguments": {"query": "t"}}', "", [("search", {"query": "t"})]),
]
PYTHONIC: list[tuple[str, str, Calls]] = [
    ("I call: [search(query='x')]", "I call: ", [("search", {"query": "x"})]),
    (
        "[search(limit=1)] and [weather(city='Oslo', extra={'a': [1, 2]})] now.",
        " and  now.",
        [("search", {"limit": 1}), ("weather", {"city": "Oslo", "extra": {"a": [1, 2]}})],
    ),
    ("See [search](http://x), [1], [other(a=1)] [", "See [search](http://x), [1], [other(a=1)] [", []),
]
HERMES: list[tuple[str, str, Calls]] = [
    (
        'First. \n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "area", "arguments": {}}\n</tool_call>\n Then.\n',
        "First. \n\n Then.\n",
        [("search", {}), ("area", {})],
    ),
    ('\n\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>\n', "", [("search", {})]),
]
HUNYUAN: list[tuple[str, str, Calls]] = [
    (
        'I look.\n<tool_calls>[{"name": "weather", "arguments": {"city": "Dallas", "state": "TX"}}, '
        '{"name": "search", "arguments": {"query": "[x] </tool_call>"}}]</tool_calls>',
        "I look.\n",
        [("weather", DALLAS), ("search", {"query": "[x] </tool_call>"})],
    ),
    ('<tool_calls>\n[\n  {"arguments": {}, "name": "search"}\n]\n</tool_calls>', "", [("search", {})]),
]
RECORDED = {
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "minimax_m2": MINIMAX_M2,
    "lfm2": LFM2,
    "mistral": MISTRAL,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "hermes": HERMES,
    "hunyuan": HUNYUAN,
}


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"), [(form, *case) for form, cases in RECORDED.items() for case in cases]
)
def test_answer_reader_recorded_output_reads_the_calls_at_every_cut(
    form: str, text: str, said: str, calls: Calls
) -> None:
    _check(form, text, said, calls)
