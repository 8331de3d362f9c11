"""Tools in namespaces: Codex sends the tools of an MCP server so, and runs calls with `namespace` and `name` apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.scripted_server import ScriptedServer
from tests.server.test_responses import Model
from tests.text.answers.templates import QWEN3

NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
ADD = {"type": "function", "name": "add", "description": "Adds two numbers.", "strict": False, "parameters": NUMBERS}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
CALC = {"type": "namespace", "name": "mcp__calc", "description": "Sums.", "tools": [ADD, PATCH, {"type": "web_search"}]}
WRONG = {**ADD, "parameters": {"type": 5}, "strict": True}
PLAIN = {**ADD, "description": "Adds here."}


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Model]:
    made = Model(QWEN3)
    yield made
    made.close()


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_of_a_namespace_go_back_and_forth_by_both_names(model: Model) -> None:
    tools: Any = [PLAIN, CALC]
    said = called("mcp__calc__add", a=1, b=2) + called("add", a=3, b=4)
    answer = model.ask(said, tools=tools, store=False)
    first, second = answer.output
    assert [(call.type, call.namespace, call.name) for call in answer.output] == [
        ("function_call", "mcp__calc", "add"),
        ("function_call", None, "add"),
    ]
    assert "namespace" not in second.to_dict()
    assert json.loads(first.arguments) == {"a": 1, "b": 2}
    assert answer.metadata == {"ignored": "web_search"}
    prompt = model.prompt()
    assert '"name": "mcp__calc__add", "description": "Sums.\\n\\nAdds two numbers."' in prompt
    assert '"name": "mcp__calc__patch", "description": "Patches."' in prompt
    told = [{"role": "user", "content": "How is it?"}, *(call.to_dict() for call in answer.output)]
    for call, result in ((first, "3"), (second, "7")):
        named = {"name": call.name, "namespace": call.namespace}
        told.append({"type": "function_call_output", "call_id": call.call_id, "output": result, **named})
    model.ask("It is 3.", told, tools=tools, store=False)
    assert model.prompt().startswith(prompt)
    assert '{"name": "mcp__calc__add", "arguments": {"a": 1, "b": 2}}' in model.prompt()


def test_custom_tool_of_a_namespace_is_called_with_its_text(model: Model) -> None:
    model.answer = called("mcp__calc__patch", input="+x")
    body: dict[str, Any] = {"input": "hello", "tools": [CALC]}
    with model.server.client() as http:
        (call,) = http.post("/v1/responses", json=body).json()["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "mcp__calc", "patch")
        assert call["input"] == "+x"
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        answer = http.post("/v1/responses", json={**body, "input": [{"role": "user", "content": "x"}, call, result]})
    assert answer.status_code == 200, answer.text
    assert '{"name": "mcp__calc__patch", "arguments": {"input": "+x"}}' in model.prompt()


def test_tool_of_a_namespace_can_be_chosen(model: Model) -> None:
    """The grammar is that of a function with the joined name."""
    joined = {"type": "function", "name": "mcp__calc__add"}
    parted = {"type": "function", "namespace": "mcp__calc", "name": "add"}

    def grammar(http: httpx.Client, tools: list[Any], choice: dict[str, Any]) -> Any:
        answer = http.post("/v1/responses", json={"input": "x", "tools": tools, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        return model.server.engine.submitted[-1].params.grammar

    model.answer = called("mcp__calc__add", a=1, b=2)
    with model.server.client() as http:
        named = [grammar(http, *each) for each in (([{**ADD, **joined}], joined), ([CALC], parted), ([CALC], joined))]
        some = {"type": "allowed_tools", "mode": "required", "tools": [parted]}
        allowed = [grammar(http, tools, some) for tools in ([{**ADD, **joined}], [CALC])]
    assert named[0] is not None
    assert named[0] == named[1] == named[2]
    assert allowed[0] is not None
    assert allowed[0] == allowed[1]


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([{**CALC, "tools": [WRONG]}], "tools.0.tools.0.parameters", "type"),
        ([{**CALC, "name": "a b"}], "tools.0.name", "must match"),
        ([{**CALC, "tools": [{"type": "function"}]}], "tools.0.tools.0.name", "missing"),
        ([CALC, {**ADD, "name": "mcp__calc__add"}], "tools", "two tools"),
    ],
)  # fmt: skip
def test_malformed_tool_of_a_namespace_is_refused_by_its_place(
    model: Model, tools: list[Any], param: str, words: str
) -> None:
    with model.server.client() as http:
        answer = http.post("/v1/responses", json={"input": "x", "tools": tools})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert words in error["message"]


def test_tools_of_many_mcp_servers_are_offered(patience: None) -> None:
    """More tools than the 128 of OpenAI's chats: developers have several servers."""
    scripted = ScriptedServer(QWEN3, partial(FakeEngine, context_length=1 << 15))
    scripted.answer = called("t149")
    names, ask = [f"t{i}" for i in range(150)], [{"role": "user", "content": "x"}]
    inside = [{"type": "function", "name": name} for name in names]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "x", "tools": inside},
        "/v1/chat/completions": {
            "messages": ask,
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        },
        "/v1/messages": {
            "max_tokens": 99,
            "messages": ask,
            "tools": [{"name": name, "input_schema": {"type": "object"}} for name in names],
        },
    }
    try:
        with scripted.server.client() as http:
            for path, body in bodies.items():
                answer = http.post(path, json={"model": "tiny", **body})
                assert answer.status_code == 200, answer.text
                assert '"t149"' in answer.text
                assert '"t149"' in scripted.prompt()
    finally:
        scripted.server.close()
