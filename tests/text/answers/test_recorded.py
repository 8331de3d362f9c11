"""Outputs of the kinds that other engines' parsers accept are read as the same calls, however they are cut."""

from __future__ import annotations

import json
import re
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
GRANITE: list[tuple[str, str, Calls]] = [
    (
        'I look.\n<|tool_call|> [\n  {"name": "weather", "arguments": {"city": "Dallas"}},\n'
        '  {"arguments": {"limit": 3}, "name": "search"}\n]\nSo.',
        "I look.\n\nSo.",
        [("weather", {"city": "Dallas"}), ("search", {"limit": 3})],
    ),
    (
        '<tool_call> [{"name": "search", "arguments": {"query": "C:\\\\a \\"x\\" \\n"}}]',
        "",
        [("search", {"query": 'C:\\a "x" \n'})],
    ),
    ('<function_call> {"name": "search", "arguments": {}}', "", [("search", {})]),
    ('Some [{"name": "search"}]', 'Some [{"name": "search"}]', []),
]
COHERE: list[tuple[str, str, Calls]] = [
    (
        '<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Dallas"}},\n'
        '    {"tool_call_id": "1", "tool_name": "search", "parameters": {"limit": 42}}\n]\n<|END_ACTION|>',
        "",
        [("weather", {"city": "Dallas"}), ("search", {"limit": 42})],
    ),
    ("<|START_RESPONSE|>foo: 🌈<|END_RESPONSE|>", "foo: 🌈", []),
]
COMMAND_R: list[tuple[str, str, Calls]] = [
    (
        'Plan.\nAction: ```json\n[\n    {\n        "tool_name": "search",\n        "parameters": {\n            '
        '"query": "x"\n        }\n    }\n]```',
        "Plan.\n",
        [("search", {"query": "x"})],
    ),
]
OLMO3: list[tuple[str, str, Calls]] = [
    (
        "<function_calls>weather(city='Dallas', state='TX')\nsearch()\narea(size={}, digits=2)</function_calls>",
        "",
        [("weather", DALLAS), ("search", {}), ("area", {"size": {}, "digits": 2})],
    ),
    (
        "I look.<function_calls>search(query='Martha\\'s \\\"x\\\"', limit=null, deep=[true, None])</function_calls>",
        "I look.",
        [("search", {"query": 'Martha\'s "x"', "limit": None, "deep": [True, None]})],
    ),
]
PHI4: list[tuple[str, str, Calls]] = [
    (
        'Let me check.\nfunctools[{"name": "search", "arguments": {"query": "x", "limit": 1}}]\nMore?',
        "Let me check.\n\nMore?",
        [("search", {"query": "x", "limit": 1})],
    ),
    (
        'functools[\n  {"name": "weather", "arguments": {"city": "Tokyo 🎉"}},\n'
        '  {"name": "search", "arguments": {}}\n]',
        "",
        [("weather", {"city": "Tokyo 🎉"}), ("search", {})],
    ),
    ("functools[] This is just text", "functools[] This is just text", []),
    ('functools{"name": "search"}', 'functools{"name": "search"}', []),
]
XLAM: list[tuple[str, str, Calls]] = [
    (
        '[{"name": "weather", "arguments": {"city": "Dallas", "state": "TX"}}, {"name": "search", "arguments": {}}]',
        "",
        [("weather", DALLAS), ("search", {})],
    ),
    (
        'I\'ll help.\n```json\n[{"name": "search", "arguments": {"limit": 1}}]\n```',
        "I'll help.\n",
        [("search", {"limit": 1})],
    ),
    ('I check.[TOOL_CALLS][{"name": "search", "arguments": {}}]', "I check.", [("search", {})]),
    ('I check.<tool_call>[{"name": "search", "arguments": {}}]</tool_call>', "I check.", [("search", {})]),
    ('See [{"name": "Bob"}] and [1]', 'See [{"name": "Bob"}] and [1]', []),
]
HY3: list[tuple[str, str, Calls]] = [
    ("<tool_calls><tool_call>search<tool_sep></tool_call></tool_calls>", "", [("search", {})]),
    (
        "Checking.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Dallas</arg_value>\n"
        "<arg_key>state</arg_key>\n<arg_value>TX</arg_value>\n</tool_call>\n<tool_call>search<tool_sep><arg_key>limit"
        "</arg_key><arg_value>3</arg_value></tool_call>\n</tool_calls>",
        "Checking.",
        [("weather", DALLAS), ("search", {"limit": 3})],
    ),
]
DSML: list[tuple[str, str, Calls]] = [
    (
        'Let me check. <｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">杭州</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="search">\n'
        '<｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="query" string="true">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "Let me check. ",
        [("weather", {"city": "杭州"}), ("search", {"limit": 3, "query": "5"})],
    ),
]
SOLAR: list[tuple[str, str, Calls]] = [
    (
        "<|content|>Let me check.\n<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>weather"
        '<|tool_call:args|>{"city":"Paris"}<|tool_call:end|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>search'
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        "Let me check.\n",
        [("weather", {"city": "Paris"}), ("search", {})],
    ),
    ("<|content|>If a < b, use {x} or [y].\n", "If a < b, use {x} or [y].\n", []),
]
INTERNLM: list[tuple[str, str, Calls]] = [
    (
        '(3+5)*2 =<|action_start|><|plugin|>\n{"name": "search", "parameters": {"limit": 8}}<|action_end|>',
        "(3+5)*2 =",
        [("search", {"limit": 8})],
    ),
]
LONGCAT: list[tuple[str, str, Calls]] = [
    (
        "Let me help.\n<longcat_tool_call>search\n<longcat_arg_key>query</longcat_arg_key>\n<longcat_arg_value>"
        "value1</longcat_arg_value>\n</longcat_tool_call>",
        "Let me help.\n",
        [("search", {"query": "value1"})],
    ),
    ('<longcat_tool_call>\n{"name": "search", "arguments": {}}\n</longcat_tool_call>', "", [("search", {})]),
]
RECORDED = {
    "granite": GRANITE,
    "cohere": COHERE,
    "command_r": COMMAND_R,
    "olmo3": OLMO3,
    "phi4_mini": PHI4,
    "xlam": XLAM,
    "hy_v3": HY3,
    "hy_v3_opensource": [
        (re.sub(r"(</?(?:tool|arg)_[a-z]+)>", r"\1:opensource>", text), said, calls) for text, said, calls in HY3
    ],
    "deepseek_v4": DSML,
    "deepseek_v32": [(text.replace("tool_calls>", "function_calls>"), said, calls) for text, said, calls in DSML],
    "solar_open": SOLAR,
    "internlm": INTERNLM,
    "longcat": LONGCAT,
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
