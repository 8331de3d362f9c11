"""Tools that a conversation brings: `additional_tools`, and searches for tools that the client does, as Codex asks for.

The types are OpenAI's client's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from tests.server.test_namespaces import ADD, CALC, called
from tests.server.test_responses import Model
from tests.text.answers.templates import QWEN3

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": QUERY}
ASKED = {"role": "user", "content": "Add 1 and 2."}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [CALC]}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Model]:
    made = Model(QWEN3)
    yield made
    made.close()


def ask(model: Model, said: str, items: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the response, whose items OpenAI's client knows; its events have the same items."""
    model.answer = said
    options: Any = {"model": "tiny", "input": items, "store": False, **fields}
    events = [event.to_dict() for event in model.api.responses.create(**options, stream=True)]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    whole = model.api.responses.create(**options).to_dict()
    for item in done:
        ITEM.validate_python(item)
    assert [{**item, "id": "", "call_id": ""} for item in whole["output"]] == [
        {**item, "id": "", "call_id": ""} for item in done
    ]
    return whole


def test_search_for_tools_is_called_and_what_it_finds_can_be_called(model: Model) -> None:
    whole = ask(model, called("tool_search", query="sums"), [ASKED], tools=[SEARCH])
    (search,) = whole["output"]
    assert (search["type"], search["execution"], search["arguments"]) == (
        "tool_search_call",
        "client",
        {"query": "sums"},
    )
    assert whole["tools"] == [{**SEARCH, "parameters": None}]
    assert '"name": "tool_search", "description": "Finds tools."' in model.prompt()
    assert "mcp__calc__add" not in model.prompt()

    found = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "tools": [CALC]}
    told = [ASKED, search, {**found, "status": "completed"}]
    whole = ask(model, called("mcp__calc__add", a=1, b=2), told, tools=[SEARCH])
    (call,) = whole["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__calc", "add")
    prompt = model.prompt()
    assert '"name": "mcp__calc__add"' in prompt.partition("Add 1 and 2.")[0]
    assert '{"name": "tool_search", "arguments": {"query": "sums"}}' in prompt
    assert "Tools found: mcp__calc__add, mcp__calc__patch" in prompt
    assert whole["metadata"] == {"ignored": "web_search"}

    again = [*told, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}]
    ask(model, "It is 3.", [*again, {**search, "call_id": "c2"}, {**found, "call_id": "c2"}], tools=[SEARCH])
    assert model.prompt().count('"name": "mcp__calc__add", "description"') == 1, "found twice, offered once"
    ask(model, "None.", [ASKED, search, {**found, "tools": []}], tools=[SEARCH])
    assert "No tools found." in model.prompt()


def test_search_that_is_cut_off_is_incomplete_and_keeps_its_text(model: Model) -> None:
    whole = ask(model, called("tool_search", query="sums"), [ASKED], tools=[SEARCH], max_output_tokens=60)
    (search,) = whole["output"]
    assert (whole["status"], search["type"], search["status"]) == ("incomplete", "tool_search_call", "incomplete")
    assert isinstance(search["arguments"], str)


def test_call_that_is_cut_off_is_incomplete_in_its_events_as_in_the_answer(model: Model) -> None:
    for max_output_tokens, status in ((52, "incomplete"), (200, "completed")):
        whole = ask(model, called("add", a=1, b=2), [ASKED], tools=[ADD], max_output_tokens=max_output_tokens)
        assert [(item["type"], item["status"]) for item in whole["output"]] == [("function_call", status)]


def test_additional_tools_are_offered_and_the_first_of_a_name_stands(model: Model) -> None:
    other = {"type": "additional_tools", "tools": [{**ADD, "name": "mcp__calc__add", "description": "Another."}]}
    whole = ask(model, called("mcp__calc__add", a=1, b=2), [ADDED, ASKED, other])
    assert [(call["namespace"], call["name"]) for call in whole["output"]] == [("mcp__calc", "add")]
    assert '"description": "Sums.\\n\\nAdds two numbers."' in model.prompt()
    assert "Another." not in model.prompt()


def test_search_that_the_server_would_do_is_left_out(model: Model) -> None:
    """All tools are in the prompt: none has to be searched for."""
    whole = ask(model, "Well.", [ASKED], tools=[{"type": "tool_search"}, {**ADD, "defer_loading": True}])
    assert whole["metadata"] == {"ignored": "tool_search"}
    assert '"name": "add"' in model.prompt()
    assert "tool_search" not in model.prompt()


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "tool_search_call", "execution": "server", "call_id": "c", "arguments": {}}, "input.1.execution"),
        ({"type": "tool_search_call", "arguments": {}}, "input.1.call_id"),
        ({"type": "tool_search_output", "call_id": "none", "tools": [CALC]}, "input"),
        ({"type": "additional_tools", "tools": [{"type": "function"}]}, "input.1.tools.0.name"),
        ({"type": "additional_tools", "role": "user", "tools": []}, "input.1.role"),
    ],
)
def test_malformed_items_of_tools_are_refused_by_their_place(model: Model, item: dict[str, Any], param: str) -> None:
    with model.server.client() as http:
        answer = http.post("/v1/responses", json={"model": "tiny", "input": [ASKED, item]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text
