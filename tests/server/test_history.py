"""Conversations that clients send back: what they received, with the fields of their own libraries."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from forebay.base.errors import InvalidRequest
from forebay.server.api.anthropic.messages_request import MessagesRequest
from forebay.server.api.openai.responses_request import ResponsesRequest
from forebay.server.protocol.requests import ChatRequest
from tests.deadlines import HANGS_S
from tests.server.test_tools import ASK, CALL, TOOLS, Speaker
from tests.text.answers.templates import MANNERS, QWEN25

CUT_OFF = '{"city": "Pa'
NOT_OBJECTS = [CUT_OFF, "", "[1]", "null", "no JSON at all", "[" * 5000, '{"a": "\\ud800"}']


@pytest.fixture
def model(patience: None) -> Any:
    made = []

    def make(template: str) -> Speaker:
        made.append(Speaker(template))
        made[-1].answer = "Well."
        return made[-1]

    yield make
    for speaker in made:
        speaker.server.close()


def conversation(arguments: str, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    return [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "invalid arguments"},
        {"role": "user", "content": "go on", **fields},
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("manner", MANNERS)
def test_chat_history_with_arguments_cut_off_renders_in_every_template(model: Any, manner: str) -> None:
    speaker = model(MANNERS[manner].template)
    for arguments in NOT_OBJECTS:
        with speaker.server.client() as http:
            body = {"messages": conversation(arguments), "tools": TOOLS, "max_tokens": 4}
            answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (arguments[:20], answer.text)
    with speaker.server.client() as http:
        http.post("/v1/chat/completions", json={"messages": conversation(CUT_OFF), "tools": TOOLS, "max_tokens": 4})
    assert "Pa" in speaker.prompt().replace("Par", "")


def test_responses_history_with_arguments_cut_off_is_answered(model: Any) -> None:
    speaker = model(QWEN25)
    items: list[Any] = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": CUT_OFF, "status": "incomplete"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ]
    with speaker.server.client() as http:
        answer = http.post("/v1/responses", json={"input": items})
    assert answer.status_code == 200, answer.text
    assert "invalid_json" in speaker.prompt()


class Weather(BaseModel):
    city: str


def test_chat_message_parsed_by_the_client_and_appended_is_answered(model: Any) -> None:
    """As the client's documentation shows: `messages.append(completion.choices[0].message)`."""
    speaker = model(QWEN25)
    speaker.answer = CALL
    with openai.OpenAI(base_url=f"{speaker.server.url}/v1", api_key="x", max_retries=0, timeout=HANGS_S) as api:
        tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
        messages: list[Any] = list(ASK)
        parsed = api.chat.completions.parse(model="tiny", messages=messages, tools=tools).choices[0].message
        assert parsed.tool_calls
        assert parsed.tool_calls[0].function.parsed_arguments == Weather(city='Z\u00fcrich "{}"')
        messages += [parsed, {"role": "tool", "tool_call_id": parsed.tool_calls[0].id, "content": "sun"}]
        again = api.chat.completions.with_raw_response.parse(model="tiny", messages=messages, tools=tools)
    assert again.headers["x-forebay-ignored"] == "parsed_arguments"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}], "bar": 2}]}),
        (ChatRequest, {"messages": conversation("{}", foo=1, bar=2)}),
        (
            MessagesRequest,
            {
                "model": "m",
                "max_tokens": 4,
                "messages": [{"role": "user", "foo": 1, "content": [{"type": "text", "text": "x", "bar": 2}]}],
            },
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "foo": 1}], "bar": 2}]},
        ),
    ],
)
def test_history_unknown_fields_are_ignored_and_counted(kind: Any, body: dict[str, Any]) -> None:
    assert set(kind.parse(body).passed_over) == {"foo", "bar"}
    with pytest.raises(InvalidRequest, match="unknown field 'frobnicate'"):
        kind.parse({**body, "frobnicate": 1})


def test_history_field_without_content_is_not_counted() -> None:
    empty: dict[str, Any] = {"annotations": [], "refusal": None, "audio": None, "logprobs": {}}
    assert ChatRequest.parse({"messages": [{"role": "user", "content": "x", **empty}]}).passed_over == ()
    links = [{"type": "url_citation", "url": "x"}]
    body = {"messages": [{"role": "user", "content": "x", "annotations": links}]}
    assert ChatRequest.parse(body).passed_over == ("annotations",)


def test_ignored_header_unknown_name_with_line_breaks_stays_one_header(model: Any) -> None:
    """C33: the name of a field is the client's, and is written into a header."""
    names = {"a\r\nset-cookie: b": 1, "\u00e9\x00": 1, **{f"name{i}": 1 for i in range(1000)}}
    with model(QWEN25).server.client() as http:
        body = {"messages": [{"role": "user", "content": "x", **names}], "max_tokens": 2}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-forebay-ignored"].startswith("a\\r\\nset-cookie: b, \\xe9\\x00, name0")
    assert len(answer.headers["x-forebay-ignored"]) <= 1024


def test_messages_thread_is_refused_with_the_code_that_clients_retry_on(model: Any) -> None:
    speaker = model(QWEN25)
    body = {"model": "tiny", "max_tokens": 4, "messages": ASK}
    with speaker.server.client() as http:
        refused = http.post("/v1/messages", json={**body, "thread": {"type": "new"}})
        assert http.post("/v1/messages", json={**body, "thread": None}).status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.slow
def test_messages_tool_runner_of_the_client_runs_to_its_end(model: Any) -> None:
    """The client's runner asks for a thread, is refused, and sends the whole conversation."""
    speaker = model(QWEN25)
    answers = iter([CALL, "It is sunny."])
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Say the weather."""
        asked.append(city)
        speaker.answer = next(answers)
        return "sun"

    speaker.answer = next(answers)
    with anthropic.Anthropic(base_url=speaker.server.url, api_key="x", max_retries=0, timeout=HANGS_S) as api:
        runner = api.beta.messages.tool_runner(model="tiny", max_tokens=99, messages=ASK, tools=[get_weather])
        last = runner.until_done()
    assert asked == ['Z\u00fcrich "{}"']
    assert last.content[0].text == "It is sunny."
