"""Tools that a conversation brings: `additional_tools`, and searches for tools that the client does, as Codex asks for.

The types are OpenAI's client's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from forebay.http.security import Tenant
from forebay.server.api.openai.compaction import expanded
from forebay.server.api.openai.responses_items import read, tools_offered, written
from forebay.server.api.openai.seals import Seals
from forebay.server.api.openai.truncation import without
from forebay.text.answers.probes import find_formats
from tests.server.conftest import MODEL, start
from tests.server.fake_engine import FakeEngine
from tests.server.test_namespaces import ADD, CALC, called
from tests.server.test_responses import Model
from tests.text.answers.templates import QWEN3
from tests.text.tiny_tokenizer import tiny_tokenizer

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": QUERY}
ASKED = {"role": "user", "content": "Add 1 and 2."}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [CALC]}
SEARCHED = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "sums"}}
FOUND_ADD = {"type": "tool_search_output", "call_id": "c", "tools": [ADD]}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Model]:
    made = Model(QWEN3)
    yield made
    made.close()


def ask(model: Model, said: str, items: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the response, whose items OpenAI's client knows. Its events have the same items, each call completed:
    opencode 1.18 sees no other call."""
    model.answer = said
    options: Any = {"model": "tiny", "input": items, "store": False, **fields}
    events = [event.to_dict() for event in model.api.responses.create(**options, stream=True)]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    whole = model.api.responses.create(**options).to_dict()
    for item in done:
        ITEM.validate_python(item)
    own = {"id": "", "call_id": "", "status": "completed"}
    assert [{**item, **own} for item in whole["output"]] == [{**item, **own} for item in done]
    assert all(item["status"] == "completed" for item in done if item["type"] != "message")
    assert whole["status"] == events[-1]["response"]["status"]
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


def test_call_that_is_cut_off_makes_the_response_incomplete(model: Model) -> None:
    for max_output_tokens, status in ((52, "incomplete"), (200, "completed")):
        whole = ask(model, called("add", a=1, b=2), [ASKED], tools=[ADD], max_output_tokens=max_output_tokens)
        assert whole["status"] == status
        assert [(item["type"], item["status"]) for item in whole["output"]] == [("function_call", status)]


def test_additional_tools_are_offered_and_the_first_of_a_name_stands(model: Model) -> None:
    other = {"type": "additional_tools", "tools": [{**ADD, "name": "mcp__calc__add", "description": "Another."}]}
    whole = ask(model, called("mcp__calc__add", a=1, b=2), [ADDED, ASKED, other])
    assert [(call["namespace"], call["name"]) for call in whole["output"]] == [("mcp__calc", "add")]
    assert '"description": "Sums.\\n\\nAdds two numbers."' in model.prompt()
    assert "Another." not in model.prompt()


def test_tools_of_a_conversation_stay_if_its_items_are_dropped() -> None:
    items = read([ADDED, ASKED, SEARCHED, FOUND_ADD, {"role": "assistant", "content": "Well."}, ASKED])
    assert written(read(written(items))) == written(items)
    kept = without(items, 5)
    assert [item.type for item in kept] == ["additional_tools", "additional_tools", "message"]
    assert [offered.name for offered in tools_offered((), kept)] == ["mcp__calc__add", "mcp__calc__patch", "add"]


def test_tools_before_a_summary_stay() -> None:
    pytest.importorskip("cryptography", reason="nothing is sealed without it: pip install 'forebay[compaction]'")
    seals, tenant = Seals(b"secret"), Tenant("one")
    sealed = seals.seal(tenant, b'{"summary": "x"}', time.time())
    items = read([ADDED, ASKED, SEARCHED, FOUND_ADD, {"role": "assistant", "content": "Well."}, ASKED])
    summed = read([*written(items), {"type": "compaction", "encrypted_content": sealed}])
    assert [item.type for item in expanded(seals, tenant, summed)] == [
        "additional_tools", "message", "additional_tools", "message", "compaction",
    ]  # fmt: skip


def test_search_of_a_stored_response_is_continued(patience: None) -> None:
    tokenizer = tiny_tokenizer(template=QWEN3)
    model = replace(MODEL, answers=find_formats(tokenizer))
    with (
        closing(start(tokenizer, FakeEngine, model=model, responses_store_bytes=1 << 20)) as server,
        server.client() as http,
    ):
        first = http.post("/v1/responses", json={"input": [ASKED, SEARCHED, FOUND_ADD], "max_output_tokens": 5}).json()
        body = {"input": "Go on.", "previous_response_id": first["id"], "max_output_tokens": 5}
        assert http.post("/v1/responses", json=body).status_code == 200
        listed = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        prompt = tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert "Adds two numbers." in prompt
    assert {item["type"] for item in listed} == {"message", "tool_search_call", "tool_search_output"}


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
