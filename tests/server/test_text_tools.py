"""Tools that take one text (`custom`), and choices among tools (`allowed_tools`), as the official client knows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import openai
import pytest

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import compiled
from forebay.server.protocol.requests import ChatRequest
from tests.deadlines import HANGS_S
from tests.server.scripted_server import tiny_vocabulary
from tests.server.test_responses import Model
from tests.server.test_tools import ASK, TOOLS, Speaker
from tests.text.answers.templates import GPT_OSS, LLAMA4, MANNERS, QWEN3_CODER, QWEN25

PATCH = 'say "hi" \\ now\n\tand then\n'
CALL = f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': PATCH}})}\n</tool_call>"


def text_tool(**format: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "description": "Patches.", **format}}


@pytest.fixture(scope="module")
def speaker(patience: None) -> Iterator[Model]:
    made = Model(QWEN25)
    yield made
    made.close()


@pytest.mark.slow
def test_chat_text_tool_called_twice_returns_and_takes_back_its_text(speaker: Model) -> None:
    tools = [*TOOLS, text_tool()]
    messages: list[Any] = list(ASK)
    with openai.OpenAI(base_url=f"{speaker.server.url}/v1", api_key="x", max_retries=0, timeout=HANGS_S) as api:
        for _ in range(2):
            speaker.answer = f"Let me.{CALL}"
            answer = api.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=500)
            (call,) = answer.choices[0].message.tool_calls or ()
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", PATCH)
            streamed = api.chat.completions.create(
                model="tiny", messages=messages, tools=tools, max_tokens=500, stream=True
            )
            deltas = [part for chunk in streamed for part in chunk.choices[0].delta.tool_calls or ()]
            assert [part.model_extra["custom"] for part in deltas if "custom" in (part.model_extra or {})] == [
                {"name": "patch", "input": ""},
                {"input": PATCH},
            ]
            messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert speaker.prompt().count("done") == 1  # of the first round
    assert json.dumps({"input": PATCH}) in speaker.prompt()


def test_responses_text_tool_called_twice_returns_and_takes_back_its_text(speaker: Model) -> None:
    tools: Any = [{"type": "custom", "name": "patch", "format": {"type": "text"}}]
    items: list[Any] = [{"role": "user", "content": "How is it?"}]
    for _ in range(2):
        speaker.answer = f"Let me.{CALL}"
        answer = speaker.api.responses.create(model="tiny", input=items, tools=tools)
        message, call = answer.output
        assert (message.type, call.type, call.name, call.input) == ("message", "custom_tool_call", "patch", PATCH)
        events = list(speaker.api.responses.create(model="tiny", input=items, tools=tools, stream=True))
        told = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        assert [(event.type.rpartition(".")[2], event.to_dict().get("delta") or event.to_dict().get("input"))
                for event in told] == [("delta", PATCH), ("done", PATCH)]  # fmt: skip
        assert events[-1].response.output[-1].input == PATCH
        items += answer.output
        items.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"})
    assert speaker.prompt().count("done") == 1  # of the first round


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("manner", MANNERS)
def test_text_tool_is_told_in_every_template(patience: None, manner: str) -> None:
    speaker = Speaker(MANNERS[manner].template)
    try:
        call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": PATCH}}
        talk = [
            *ASK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "k"},
        ]
        with speaker.server.client() as http:
            body = {"messages": talk, "tools": [text_tool()], "max_tokens": 2}
            answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    finally:
        speaker.server.close()


def test_text_tool_input_cut_off_is_what_there_is_of_it(speaker: Model) -> None:
    speaker.answer = CALL
    body = {"messages": ASK, "tools": [text_tool()], "max_tokens": CALL.index("now")}
    with speaker.server.client() as http:
        (call,) = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    assert PATCH.startswith(call["custom"]["input"])
    assert call["custom"]["input"].startswith("say ")


def takes(speaker: Speaker, text: str) -> bool:
    grammar, tokenizer = speaker.server.engine.submitted[-1].params.grammar, speaker.server.tokenizer
    assert grammar is not None
    matcher = compiled(grammar, tiny_vocabulary())
    tokens = tokenizer.encode(text)
    whole = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
    return bool(whole and matcher.is_accepting())


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


LARK = 'start: "say " /"[a-z]+"/ (LF | "/")+ line\nline: /[^\\n]*/\n%import common.LF\n'
REGEX = r'say "[a-z]+"(\n|/)+[^\n]*'
FITS = ['say "hi"\n', 'say "hi"/\n/then \\ "so"', 'say "hi"/\tthere \u00e9']
FITS_NOT = ["say hi\n", 'say "hi"', 'say "hi"\nand\nmore', "say", ""]


def grammar_tool(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": grammar}}


SPELLED: dict[str, tuple[str, Callable[[str], str]]] = {
    "JSON": (QWEN25, lambda text: called("patch", input=text)),
    "tags": (
        QWEN3_CODER,
        lambda text: (
            f"<tool_call>\n<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    "Python": (LLAMA4, lambda text: f"[patch(input={json.dumps(text, ensure_ascii=False)})]"),
    "channels": (
        GPT_OSS,
        lambda text: (
            "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
            f"{json.dumps({'input': text}, ensure_ascii=False)}"
        ),
    ),
}


SYNTAXES = {"lark": LARK, "regex": REGEX}
# Each spelling once, each syntax and choice twice; a case computes masks of many hundred tokens.
QUICK = {
    ("JSON", "lark", "auto"),
    ("tags", "regex", "required"),
    ("Python", "lark", "required"),
    ("channels", "regex", "auto"),
}


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("spelled", "syntax", "choice"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(SPELLED, SYNTAXES, ("auto", "required"))
    ],
)
def test_text_tool_grammar_is_enforced_in_each_spelling(patience: None, spelled: str, syntax: str, choice: str) -> None:
    tool = grammar_tool(syntax, SYNTAXES[syntax])
    template, write = SPELLED[spelled]
    speaker = Speaker(template)
    try:
        with speaker.server.client() as http:
            body = {"messages": ASK, "tools": [tool], "tool_choice": choice, "max_tokens": 1}
            answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        # Where values are written as they are, a regular expression takes the line break that ends the value.
        fits = [text for text in FITS if spelled != "tags" or not text.endswith("\n")]
        assert [text for text in fits if not takes(speaker, write(text))] == []
        assert [text for text in FITS_NOT if takes(speaker, write(text))] == []
    finally:
        speaker.server.close()


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("start: (", "cannot be used"),
        ("x", "Expected ::="),
        ("start: A\n%import python.NAME -> A", "cannot be used"),
        ("start: /(?=a)b/", "cannot be used"),
        ('start: "a"\n%ignore /x/', "%ignore is not supported"),
    ],
)
def test_text_tool_grammar_that_cannot_be_used_is_refused_by_its_place(
    speaker: Model, definition: str, words: str
) -> None:
    inline = {"type": "grammar", "syntax": "lark", "definition": definition}
    with speaker.server.client() as http:
        chat = {"messages": ASK, "tools": [grammar_tool("lark", definition)]}
        refused = http.post("/v1/chat/completions", json=chat)
        flat = {"input": "x", "tools": [{"type": "custom", "name": "patch", "format": inline}]}
        other = http.post("/v1/responses", json=flat)
    for answer, param in (
        (refused, "tools.0.custom.format.grammar.definition"),
        (other, "tools.0.format.definition"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "grammar_invalid", param)
        assert words in error["message"]


def test_allowed_tools_show_all_and_allow_some(speaker: Model) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    named = [{"type": "function", "function": {"name": "other"}}]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        with speaker.server.client() as http:
            body = {"messages": ASK, "tools": [*TOOLS, other], "tool_choice": choice, "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert "get_weather" in speaker.prompt()
        assert takes(speaker, called("other"))
        assert not takes(speaker, called("get_weather", city="x"))
        assert takes(speaker, "Hello.") == (mode == "auto")
        theirs = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "other"}]}
        flat = [{"type": "function", **tool["function"]} for tool in (*TOOLS, other)]
        speaker.api.responses.create(model="tiny", input="x", tools=flat, tool_choice=theirs, max_output_tokens=2)
        assert not takes(speaker, called("get_weather", city="x"))


def test_allowed_tools_unknown_name_is_refused_by_its_place() -> None:
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]},
    }
    with pytest.raises(InvalidRequest) as refused:
        ChatRequest.parse({"messages": ASK, "tools": TOOLS, "tool_choice": choice})
    assert refused.value.param == "tool_choice.allowed_tools.tools"
