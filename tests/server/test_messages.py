"""/v1/messages as Anthropic's own client knows it, of an engine that says what models say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import anthropic
import pytest

from forebay.base.errors import InvalidRequest
from forebay.requests.updates import CacheReport, MissReason
from forebay.server.api.anthropic.messages_request import MessagesRequest
from tests.deadlines import HANGS_S
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine
from tests.server.test_tools import CALL, Speaker
from tests.text.answers.templates import QWEN3, QWEN3_THINKING, QWEN25
from tests.text.tiny_tokenizer import TEMPLATE

Messages = Callable[..., Any]
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Says the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
ASK: Any = [{"role": "user", "content": "How is it?"}]
MARK = {"type": "ephemeral"}


def connect(server: Running, **options: Any) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(verify=False, trust_env=False)
    return anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=HANGS_S, http_client=http)


class Model(Speaker):
    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.api = connect(self.server)

    def ask(self, answer: str, messages: Any = ASK, **retentions: Any) -> Any:
        """The message, whole and streamed, which are the same."""
        self.answer = answer
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": messages, **retentions}
        whole = self.api.messages.create(**options)
        streamed = gathered(list(self.api.messages.create(**options, stream=True)))
        assert streamed == without_ids(whole.to_dict())
        return whole

    def close(self) -> None:
        self.api.close()
        self.server.close()


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def gathered(events: list[Any]) -> dict[str, Any]:
    """The message that a stream is of, by the rules of its events: blocks one after the other, with deltas of their
    kind and their index."""
    start, *middle, delta, stop = (event.to_dict() for event in events)
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = {**start["message"], **delta["delta"], "usage": {**start["message"]["usage"], **delta["usage"]}}
    assert start["message"]["usage"] == {
        **delta["usage"],
        "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    blocks: list[dict[str, Any]] = []
    written = ""
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(blocks), False)
            blocks.append(event["content_block"])
            is_open, written = True, ""
            continue
        assert (event["index"], is_open) == (len(blocks) - 1, True)
        if event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(written)
            continue
        added = event["delta"]
        assert added.pop("type") in DELTAS[blocks[-1]["type"]]
        written += added.pop("partial_json", "")
        for name, text in added.items():
            blocks[-1][name] += text
    assert not is_open
    return without_ids({**message, "content": blocks})


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


@pytest.mark.parametrize("template", [QWEN25, TEMPLATE], ids=["template", "told in text"])
def test_tools_are_used_over_three_turns(model: Callable[[str], Model], template: str) -> None:
    messages = list(ASK)
    for _ in range(2):
        answer = model(template).ask(f"Let me look.\n{CALL}\n{CALL}", messages, tools=TOOLS)
        text, *calls = answer.content
        assert (text.text, answer.stop_reason) == ("Let me look.\n", "tool_use")
        assert [(call.type, call.name, call.input) for call in calls] == [
            ("tool_use", "get_weather", {"city": 'Zürich "{}"'})
        ] * 2
        assert len({call.id for call in calls}) == 2
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sun"},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "no sun"}]},
        ]
        results[1]["is_error"] = True
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]})
    last = model(template).ask("It is sunny.", messages, tools=TOOLS)
    assert ([block.text for block in last.content], last.stop_reason) == (["It is sunny."], "end_turn")
    spelled = model(template).prompt()
    assert spelled.count("Error: no sun") == 2
    assert spelled.count("Well?") == 2
    assert json.dumps({"city": 'Zürich "{}"'}, ensure_ascii=False) in spelled


def test_one_call_where_no_more_are_wanted_and_none_where_none_is(model: Callable[[str], Model]) -> None:
    one, choice = model(QWEN25), {"type": "auto", "disable_parallel_tool_use": True}
    one.answer = f"{CALL}\n{CALL}"
    answer = one.api.messages.create(model="tiny", max_tokens=500, messages=ASK, tools=TOOLS, tool_choice=choice)
    assert ([block.type for block in answer.content], answer.stop_reason) == (["tool_use"], "tool_use")
    answer = model(QWEN25).ask(CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert ([block.text for block in answer.content], answer.stop_reason) == ([CALL], "end_turn")


def test_arguments_come_as_they_were_written_also_where_they_are_cut_off(model: Callable[[str], Model]) -> None:
    one = model(QWEN25)
    one.answer = CALL
    body = {"model": "tiny", "max_tokens": 500, "messages": ASK, "tools": TOOLS}
    with one.server.client() as http:
        raw = http.post("/v1/messages", json=body).text
        cut = http.post("/v1/messages", json={**body, "max_tokens": CALL.index('\\"{')}).json()
    assert '"input":{"city":  "Zürich \\"{}\\""}' in raw
    assert cut["content"][0]["input"] in ({}, {"city": "Zürich "})
    assert cut["stop_reason"] == "max_tokens"


def test_thinking_is_a_block_with_a_signature_and_goes_back_to_the_template(model: Callable[[str], Model]) -> None:
    one = model(QWEN3_THINKING)
    answer = one.ask(f"Let me think.\n</think>\n\nYes.{CALL}", tools=TOOLS, thinking={"type": "adaptive"})
    thought, text, call = answer.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Let me think.", "Yes.")
    assert thought.signature
    assert answer.usage.output_tokens_details.thinking_tokens == len("Let me think.\n</think>")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turn = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    one.ask("</think>Sun.", turn, tools=TOOLS)
    omitted = one.ask("Hm.</think>Yes.", thinking={"type": "adaptive", "display": "omitted"})
    assert [block.to_dict() for block in omitted.content][1] == {"type": "text", "text": "Yes."}
    assert omitted.content[0].thinking == ""


def test_request_without_thinking_gets_none_if_the_template_can_switch_it_off(model: Callable[[str], Model]) -> None:
    one = model(QWEN3)
    for retentions, told in (
        ({}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, False),
    ):
        one.ask("Yes.", **retentions)
        assert one.prompt().endswith("</think>\n\n") is told
        assert one.server.engine.submitted[-1].params.grammar is None


@pytest.mark.parametrize(("template", "ignored"), [(QWEN3, "thinking.budget_tokens"), (QWEN25, None)])
def test_budget_that_cannot_be_enforced_is_ignored_and_named(
    model: Callable[[str], Model], template: str, ignored: str | None
) -> None:
    """Clients send a budget with every request for thinking. `</think>` is no token of the model here; a model that
    does not think has nothing to limit."""
    one = model(template)
    one.answer = "Yes."
    body = {"model": "tiny", "max_tokens": 99, "messages": ASK, "thinking": {"type": "enabled", "budget_tokens": 9}}
    with one.server.client() as http:
        answer = http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.headers.get("x-forebay-ignored")) == (200, ignored), answer.text
    assert one.server.engine.submitted[-1].params.grammar is None


@pytest.mark.slow
def test_what_must_be_said_is_enforced_as_in_a_chat(model: Callable[[str], Model]) -> None:
    one = model(QWEN25)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tool,) = TOOLS
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    offered = {"tools": [{"type": "function", "function": function}]}
    named = {"type": "function", "function": {"name": tool["name"]}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {**offered, "tool_choice": "required"}),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": tool["name"]}}, {**offered, "tool_choice": named}),
    ]
    for asked, chat in cases:
        grammars = []
        with one.server.client() as http:
            for path, own in (("/v1/messages", asked), ("/v1/chat/completions", chat)):
                body = {"model": "tiny", "max_tokens": 9, "messages": ASK, **own}
                answer = http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                grammars.append(one.server.engine.submitted[-1].params.grammar)
        assert grammars[0] == grammars[1] is not None


def test_stop_sequences_are_named(model: Callable[[str], Model]) -> None:
    answer = model(QWEN25).ask("one STOP two", stop_sequences=["HALT", "STOP"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "STOP")


def test_an_answer_ends_where_the_context_does(model: Callable[[str], Model]) -> None:
    one = model(QWEN25)
    room = one.server.engine.info.context_length
    long = "x" * room
    assert one.ask(long, max_tokens=10).stop_reason == "max_tokens"
    assert one.ask(long, max_tokens=2 * room).stop_reason == "model_context_window_exceeded"
    assert one.ask("", max_tokens=2 * room).content == []


def test_each_token_of_the_prompt_is_counted_once(model: Callable[[str], Model]) -> None:
    """Less what was cached, which is told beside it, as is what a client that marks its prompt leaves there."""
    one = model(QWEN25)
    counted = one.api.messages.count_tokens(
        model="tiny", messages=ASK * 9, system="Be brief.", tools=TOOLS
    ).input_tokens
    one.server.engine.cache = CacheReport(32, MissReason.NOT_CACHED, 32)
    try:
        marked = one.ask("Yes.", ASK * 9, system="Be brief.", tools=TOOLS).usage
        tools = [{key: value for key, value in TOOLS[0].items() if key != "cache_control"}]
        plain = one.ask("Yes.", ASK * 9, system="Be brief.", tools=tools).usage
    finally:
        one.server.engine.cache = CacheReport(1, MissReason.NOT_CACHED)
    assert counted == len(one.server.engine.submitted[-1].prompt)
    assert (plain.input_tokens, plain.cache_read_input_tokens, plain.cache_creation_input_tokens) == (
        counted - 32,
        32,
        0,
    )
    created = counted // 16 * 16 - 32
    assert marked.cache_creation_input_tokens == created
    assert marked.cache_creation.model_dump() == {
        "ephemeral_1h_input_tokens": 0,
        "ephemeral_5m_input_tokens": created,
    }
    assert marked.input_tokens == counted % 16
    assert (marked.output_tokens, plain.output_tokens) == (5, 5)
    assert plain.cache["miss_reason"] == "not_cached_yet"


def test_tokens_left_in_the_cache_are_counted_by_duration(model: Callable[[str], Model]) -> None:
    """Those in front of the last mark of an hour are the hour's."""
    one = model(QWEN25)
    hour, minutes = ({**MARK, "ttl": ttl} for ttl in ("1h", "5m"))
    said = {"role": "user", "content": [{"type": "text", "text": "How is it? " * 9, "cache_control": minutes}]}
    tools = [{**TOOLS[0], "cache_control": hour}]
    usage = one.ask("Yes.", [said], system="Be brief.", tools=tools).usage
    (long, short), prompt = one.server.engine.retentions[-1], one.server.engine.submitted[-1].prompt
    assert (long.ttl_s, short.ttl_s) == (3600.0, 300.0)
    head = one.server.tokenizer.decode(prompt[: long.num_tokens], skip_special_tokens=False)
    assert head.endswith("<|im_start|>user\n")
    found = usage.cache_creation
    assert found.ephemeral_1h_input_tokens == long.num_tokens // 16 * 16 - usage.cache_read_input_tokens
    total = found.ephemeral_1h_input_tokens + found.ephemeral_5m_input_tokens
    assert total == usage.cache_creation_input_tokens > found.ephemeral_1h_input_tokens > 0


def test_marks_are_places_to_go_on_from(launch: Callable[..., Running]) -> None:
    """Far before the last messages, whose ends are places in any case, and at the end of the very last."""
    server = launch(lambda: FakeEngine(wants_resume_points=True))
    said = {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": MARK}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [*ASK, said] + ASK * 5}, "hello<|im_end|>\n"),
        ({"messages": ASK, "cache_control": MARK}, "How is it?<|im_end|>\n"),
    ]
    with connect(server) as api:
        for case, _ in cases:
            api.messages.create(model="tiny", max_tokens=1, **case)
    submitted = zip(cases, server.engine.submitted, server.engine.resume_points, strict=True)
    for (_, place), stream, points in submitted:
        texts = [server.tokenizer.decode(stream.prompt[:point], skip_special_tokens=False) for point in points]
        assert any(text.endswith(place) for text in texts), texts


def test_marks_of_calls_and_results_are_at_their_messages_ends() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "sun", "cache_control": MARK}
    text = {"type": "text", "text": "Well"}
    messages = [*ASK, {"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result, text]}]
    body = MessagesRequest.parse({"model": "m", "max_tokens": 1, "system": "s", "messages": messages})
    assert body.chat.marks == [((2, len("Well")), 300.0), ((3, len("sun")), 300.0)]
    assert [message.role for message in body.chat.messages] == ["system", "user", "assistant", "tool", "user"]


def marked_blocks(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"{i}", "cache_control": MARK} for i in range(count)]


@pytest.mark.parametrize("count_tokens", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": marked_blocks(4)}]},
        {"messages": ASK, "system": marked_blocks(3), "cache_control": MARK},
        {
            "messages": [
                *ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": MARK}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": marked_blocks(2), "cache_control": MARK}
                    ],
                },
            ]
        },
    ],
    ids=["text", "top level", "calls and results"],
)
def test_messages_five_marks_are_refused_and_four_are_served(
    body: dict[str, Any], count_tokens: bool, launch: Callable[..., Running]
) -> None:
    server = launch(lambda: FakeEngine(wants_resume_points=True))
    more = {"system": [*body.get("system", []), *marked_blocks(1)]}
    with connect(server) as api:
        call = api.messages.count_tokens if count_tokens else partial(api.messages.create, max_tokens=1)
        call(model="tiny", **body)
        with pytest.raises(anthropic.BadRequestError) as refused:
            call(model="tiny", **{**body, **more})
    assert refused.value.status_code == 400
    error: Any = refused.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert "5 blocks have cache_control; at most 4 may" in error["error"]["message"]


def test_messages_marks_of_tools_count() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": ASK, "tools": TOOLS}
    assert MessagesRequest.parse({**body, "system": marked_blocks(3)}).marked
    with pytest.raises(InvalidRequest, match="5 blocks have cache_control"):
        MessagesRequest.parse({**body, "system": marked_blocks(4)})


BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_line_that_changes_with_every_request_stands_behind_the_system_text(
    launch: Callable[..., Running], keep: bool, blocks: bool
) -> None:
    server = launch(keep_volatile_headers=keep)
    prompts, usages = [], []
    with connect(server) as api:
        for nonce in ("a1b2c", "d3e4f"):
            line, text = BILLING.format(nonce), "You are brief."
            split = [{"type": "text", "text": line}, {"type": "text", "text": text, "cache_control": MARK}]
            system: Any = split if blocks else f"{line}\n{text}"
            usages.append(api.messages.create(model="tiny", max_tokens=1, messages=ASK, system=system).usage)
            counted = api.messages.count_tokens(model="tiny", messages=ASK, system=system).input_tokens
            assert counted == len(server.engine.submitted[-1].prompt)
            prompts.append(server.tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False))
    assert [prompt.index("cch=") > prompt.index("brief.") for prompt in prompts] == [not keep] * 2
    assert [getattr(usage, "moved", None) for usage in usages] == [None if keep else [BILLING.split(":")[0]]] * 2


def test_errors_are_the_clients_own_types(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(interval_s=0.02), api_keys=("right",))
    with connect(server) as api:
        with pytest.raises(anthropic.AuthenticationError) as denied:
            api.messages.create(model="tiny", max_tokens=5, messages=ASK)
        assert denied.value.body["error"]["type"] == "authentication_error"
        api = api.with_options(api_key="right")
        with pytest.raises(anthropic.NotFoundError):
            api.messages.create(model="other", max_tokens=5, messages=ASK)
        with pytest.raises(anthropic.BadRequestError) as refused:
            api.messages.create(model="tiny", max_tokens=5, messages=ASK, extra_body={"temprature": 1})
        assert refused.value.body == {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "unknown field 'temprature': did you mean temperature?",
                "details": {"error_code": "unknown_field"},
            },
        }
        stream = api.messages.create(model="tiny", max_tokens=500, messages=ASK, stream=True)
        next(iter(stream))
        server.call(server.engine.die)
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(stream)
        assert failed.value.body["error"]["type"] == "overloaded_error"


def test_the_async_client_streams_many_at_once(model: Callable[[str], Model]) -> None:
    one = model(QWEN25)
    one.answer = f"Let me look. {CALL}"

    async def ask(api: anthropic.AsyncAnthropic) -> list[str]:
        async with api.messages.stream(model="tiny", max_tokens=500, messages=ASK, tools=TOOLS) as stream:
            final = await stream.get_final_message()
        assert final.content[1].input == {"city": 'Zürich "{}"'}
        return [block.type for block in final.content]

    async def many() -> list[list[str]]:
        http = anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        async with anthropic.AsyncAnthropic(base_url=one.server.url, api_key="x", http_client=http) as api:
            return await asyncio.gather(*(ask(api) for _ in range(8)))

    assert asyncio.run(many()) == [["text", "tool_use"]] * 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages.0.content.0.type is ")
    for kind in ("image", "document", "redacted_thinking", "search_result", "server_tool_use")
] + [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type is 'web_search_20250305'"),
    ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "messages.1.role is assistant"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "for messages of role assistant",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "thinking.budget_tokens is 500 and max_tokens 500"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens goes with type enabled"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "there is no tool with the name x"),
    ({"tools": [{"name": "f", "input_schema": {"type": 5}, "strict": True}]}, "tools.0.input_schema"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is not supported"),
    ({"container": "x"}, "container is not supported"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    model: Callable[[str], Model], change: dict[str, Any], words: str
) -> None:
    body = {"model": "tiny", "max_tokens": 500, "messages": ASK, **change}
    with model(QWEN25).server.client() as http:
        answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_what_changes_nothing_is_taken(model: Callable[[str], Model]) -> None:
    """Among it what Claude Code sends with every request: high effort is what all do where nobody says another."""
    answer = model(QWEN25).ask(
        "Yes.",
        metadata={"user_id": "somebody"},
        service_tier="auto",
        thinking={"type": "disabled"},
        output_config={"effort": "high"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    )
    assert answer.content[0].text == "Yes."
