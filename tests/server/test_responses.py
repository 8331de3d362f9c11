"""/v1/responses as OpenAI's own client knows it, of an engine that says what models say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests import loopback
from tests.deadlines import HANGS_S
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine
from tests.server.test_tools import CALL, Speaker
from tests.text.answers.templates import QWEN3, QWEN3_THINKING, QWEN25

TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Says the weather.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CHANGING = ("id", "call_id", "created_at", "completed_at")


def connect(server: Running) -> openai.OpenAI:
    http = loopback.client()
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=HANGS_S, http_client=http)


class Model(Speaker):
    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.api = connect(self.server)

    def ask(self, answer: str, what: Any = "How is it?", **wishes: Any) -> Any:
        """The response, whole and streamed, which are the same."""
        self.answer = answer
        options: dict[str, Any] = {"model": "tiny", "input": what, **wishes}
        whole = self.api.responses.create(**options)
        assert gathered(list(self.api.responses.create(**options, stream=True))) == stable(whole.to_dict())
        return whole

    def close(self) -> None:
        self.api.close()
        self.server.close()


def stable(value: Any) -> Any:
    """Without what no two answers share."""
    if isinstance(value, list):
        return [stable(entry) for entry in value]
    if isinstance(value, dict):
        return {key: stable(entry) for key, entry in value.items() if key not in CHANGING}
    return value


def gathered(events: list[Any]) -> Any:
    """The last event's response, whose items are those that the events before it are of, told by their deltas."""
    told = [event.to_dict() for event in events]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    created, progress, *middle, last = told
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    items: list[Any] = []
    while middle:
        added = middle.pop(0)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", len(items))
        name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}[
            added["item"]["type"]
        ]
        has_part = name != "function_call_arguments"
        if has_part:
            assert middle.pop(0)["type"] == "response.content_part.added"
        text = ""
        while middle[0]["type"] == f"response.{name}.delta":
            text += middle.pop(0)["delta"]
        done = middle.pop(0)
        assert (done["type"], done["arguments" if not has_part else "text"]) == (f"response.{name}.done", text)
        if has_part:
            assert middle.pop(0)["part"]["text"] == text
        ended = middle.pop(0)
        assert (ended["type"], ended["output_index"]) == ("response.output_item.done", len(items))
        assert {event["item_id"] for event in (done,)} == {added["item"]["id"]} == {ended["item"]["id"]}
        items.append(ended["item"])
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return stable(last["response"])


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Callable[[str], Model]]:
    made: dict[str, Model] = {}
    with ExitStack() as undo:

        def get(template: str) -> Model:
            if template not in made:
                made[template] = Model(template)
                undo.callback(made[template].close)
            return made[template]

        yield get


def test_functions_are_called_over_three_turns(model: Callable[[str], Model]) -> None:
    """Thinking that a client hands back sealed is seen by the template again."""
    one = model(QWEN3_THINKING)
    include: Any = ["reasoning.encrypted_content"]
    items: list[Any] = [{"role": "user", "content": "How is it?"}]
    for _ in range(2):
        said = f"Hm.</think>Let me look.\n{CALL}\n{CALL}"
        answer = one.ask(said, items, tools=TOOLS, store=False, include=include, instructions="Be brief.")
        thought, message, *calls = answer.output
        assert (answer.status, answer.output_text, message.status) == ("completed", "Let me look.\n", "completed")
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert thought.encrypted_content
        assert [call.arguments for call in calls] == ['{"city":  "Zürich \\"{}\\""}'] * 2
        assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.</think>")
        thought.content = None
        items += [item.to_dict(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    last = one.ask("</think>It is sunny.", items, tools=TOOLS, store=False, instructions="Be brief.")
    assert (last.output_text, last.status) == ("It is sunny.", "completed")
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    assert last.usage.input_tokens_details.cached_tokens == 1
    spelled = one.prompt()
    assert spelled.count("sun") >= 4
    assert spelled.index("Be brief.") < spelled.index("How is it?")
    assert json.dumps({"city": 'Zürich "{}"'}, ensure_ascii=False) in spelled


def test_an_answer_that_is_cut_off_is_incomplete(model: Callable[[str], Model]) -> None:
    answer = model(QWEN25).ask("It is sunny.", max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text) == ("incomplete", "It is")
    assert model(QWEN25).ask("").output == []


def test_what_clients_send_unasked_is_left_out_and_named(model: Callable[[str], Model]) -> None:
    tools = [{"type": "web_search"}, *TOOLS, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    answer = model(QWEN25).ask(CALL, tools=tools, metadata={"run": "7"})
    assert answer.metadata == {"run": "7", "ignored": "web_search, mcp"}
    assert [tool.name for tool in answer.tools] == ["get_weather"]
    assert [item.type for item in answer.output] == ["function_call"]
    assert "web_search" not in model(QWEN25).prompt()


@pytest.mark.slow
def test_what_must_be_said_is_enforced_as_in_a_chat(model: Callable[[str], Model]) -> None:
    one = model(QWEN3)
    form = {"name": "x", "schema": {"type": "object"}, "strict": True}
    function = {key: value for key, value in TOOLS[0].items() if key != "type"}
    offered = {"tools": [{"type": "function", "function": function}]}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"text": {"format": {"type": "json_schema", **form}}},
            {"response_format": {"type": "json_schema", "json_schema": form}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tools": TOOLS, "tool_choice": "required"}, {**offered, "tool_choice": "required"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}},
            {**offered, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ]
    for asked, chat in cases:
        grammars = []
        user = [{"role": "user", "content": "hello"}]
        with one.server.client() as http:
            for path, body in (
                ("/v1/responses", {"input": user, **asked}),
                ("/v1/chat/completions", {"messages": user, **chat}),
            ):
                answer = http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                grammars.append(one.server.engine.submitted[-1].params.grammar)
        assert grammars[0] == grammars[1] is not None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "set store=false"),
    ({"background": True}, "background", "stores no responses"),
    ({"background": True, "stream": True}, "stream", "leave stream out"),
    ({"background": True, "store": False}, "store", "leave store out"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "c"}, "conversation", "send all as input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "only texts"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input.0.encrypted_content", "not made by"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not supported"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "the name of a tool"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is missing"),
    (
        {"tools": [{"type": "web_search"}, {**TOOLS[0], "parameters": {"type": 5}, "strict": True}]},
        "tools.1.parameters",
        "type must be",
    ),
    ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
    ({"max_output_tokens": 9000}, "max_output_tokens", "lower max_output_tokens"),
    ({"tools": [{"type": "web_search"}, *TOOLS, *TOOLS]}, "tools", "two tools"),
]


@pytest.mark.parametrize(("change", "param", "words"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    model: Callable[[str], Model], change: dict[str, Any], param: str, words: str
) -> None:
    with model(QWEN25).server.client() as http:
        answer = http.post("/v1/responses", json={"input": "hello", **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert words in error["message"]


def test_a_stream_that_fails_says_so_in_an_event_of_its_own(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(interval_s=0.02))
    with connect(server) as api:
        stream = api.responses.create(model="tiny", input="hello", stream=True)
        events = [next(iter(stream))]
        server.call(server.engine.die)
        events += list(stream)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "engine_dead"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.slow
def test_the_async_client_streams_many_at_once(model: Callable[[str], Model]) -> None:
    one = model(QWEN25)
    one.answer = f"Let me look. {CALL}"

    async def ask(api: openai.AsyncOpenAI) -> list[str]:
        async with api.responses.stream(model="tiny", input="hello", tools=TOOLS) as stream:
            final = await stream.get_final_response()
        return [item.type for item in final.output]

    async def many() -> list[list[str]]:
        http = loopback.async_client()
        async with openai.AsyncOpenAI(base_url=f"{one.server.url}/v1", api_key="x", http_client=http) as api:
            return await asyncio.gather(*(ask(api) for _ in range(8)))

    assert asyncio.run(many()) == [["message", "function_call"]] * 8


@pytest.mark.parametrize("calls", [False, True])
def test_truncation_drops_the_oldest_items_and_no_more_than_it_must(
    launch: Callable[..., Running], calls: bool
) -> None:
    server = launch(lambda: FakeEngine(context_length=600))
    said: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "First."}]
    for number in range(20):
        said.append({"role": "assistant", "content": f"Answer {number}."})
        if calls:
            said.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})
            said.append({"type": "function_call_output", "call_id": f"c{number}", "output": "x" * 20})
        else:
            said.append({"role": "user", "content": f"Question {number}."})
    asked = {"input": said, "max_output_tokens": 50}
    with server.client() as http:
        refused = http.post("/v1/responses", json=asked)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        counted = http.post("/v1/responses/input_tokens", json={"input": said, "truncation": "auto"}).json()
        answer = http.post("/v1/responses", json={**asked, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert 400 < len(server.engine.submitted[-1].prompt) <= 550
    assert 400 < counted["input_tokens"] <= 600
    assert "Be brief." in prompt
    assert ("First." in prompt) == calls, "the only question stays"
    assert "Answer 19." in prompt
    assert "Answer 0." not in prompt


def test_truncation_of_what_fits_or_never_can_changes_nothing(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(context_length=600))
    with server.client() as http:
        fits = http.post("/v1/responses", json={"input": "x" * 100, "truncation": "auto", "max_output_tokens": 5})
        assert fits.status_code == 200
        too_long = http.post("/v1/responses", json={"input": "x" * 900, "truncation": "auto"})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
