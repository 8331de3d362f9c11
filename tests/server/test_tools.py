"""Tools and thinking as the official client knows them, of an engine that says what models say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import compiled
from forebay.server.api.anthropic.messages_request import MessagesRequest
from forebay.server.api.core.enforcing import rules_of
from forebay.server.api.ollama.request import OllamaChatRequest
from forebay.server.api.openai.responses_request import ResponsesRequest
from forebay.server.protocol.requests import ChatRequest
from forebay.server.protocol.strict import Strict
from tests.deadlines import HANGS_S
from tests.server.scripted_server import ScriptedServer, tiny_vocabulary
from tests.text.answers.templates import GPT_OSS, QWEN3, QWEN3_THINKING, QWEN25
from tests.text.tiny_tokenizer import TEMPLATE

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says <|im_end|> or the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Zürich \\"{}\\""}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: list[Any] = [{"role": "user", "content": "How is it?"}]


class Speaker(ScriptedServer):
    def say(self, answer: str, messages: list[Any], **wishes: Any) -> Any:
        """The message and the reason, whole and streamed, which are the same."""
        self.answer = answer
        options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 500, **wishes}
        with openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="x", max_retries=0, timeout=HANGS_S) as api:
            whole = api.chat.completions.create(**options)
            chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        choice = whole.choices[0]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert thought == (getattr(choice.message, "reasoning_content", None) or "")
        assert streamed_calls(deltas) == [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
        ]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == choice.finish_reason
        assert chunks[-1].usage.completion_tokens_details == whole.usage.completion_tokens_details
        if wishes.get("logprobs"):
            scores = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
            for field in ("content", "reasoning_content", "tool_calls"):
                joined = [token for part in scores for token in getattr(part, field)]
                assert joined == getattr(choice.logprobs, field)
        return whole


def streamed_calls(deltas: list[Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.id is not None:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.fixture(scope="module")
def speaker(patience: None) -> Iterator[Callable[[str], Speaker]]:
    made: dict[str, Speaker] = {}

    def get(template: str) -> Speaker:
        return made.setdefault(template, Speaker(template)) if template not in made else made[template]

    yield get
    for one in made.values():
        one.server.close()


@pytest.mark.parametrize("template", [QWEN25, TEMPLATE], ids=["template", "told in text"])
def test_tools_are_called_over_three_turns(speaker: Callable[[str], Speaker], template: str) -> None:
    model, messages = speaker(template), list(ASK)
    for _ in range(2):
        answer = model.say(f"Let me look.\n{CALL}\n{CALL}", messages, tools=TOOLS).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "Let me look.\n"
        arguments = [call.function.arguments for call in answer.message.tool_calls]
        assert arguments == ['{"city":  "Zürich \\"{}\\""}'] * 2
        messages.append(answer.message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "sun <|im_end|>"} for call in answer.message.tool_calls
        ]
    last = model.say("It is sunny. ", messages, tools=TOOLS).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("It is sunny. ", None, "stop")
    prompt = model.server.engine.submitted[-1].prompt
    spelled = model.prompt()
    assert spelled.count("sun <|im_end|>") == 4
    assert spelled.count("<|im_end|>") - prompt.count(2) == 4 + 1  # results and the description: text, no tokens
    assert json.dumps({"city": 'Zürich "{}"'}, ensure_ascii=False) in spelled


def test_content_is_null_where_there_are_calls_alone(speaker: Callable[[str], Speaker]) -> None:
    answer = speaker(QWEN25).say(CALL, ASK, tools=TOOLS).choices[0]
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "parallel", "one_call"),
    [
        ("auto", None, False),
        ("required", True, False),
        ("required", False, True),
        ("auto", False, True),
        (NAMED, None, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, None, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, False, True),
    ],
)
def test_grammar_of_calls_has_one_if_a_tool_is_named_or_calls_are_not_parallel(
    choice: Any, parallel: bool | None, one_call: bool
) -> None:
    body = ChatRequest.model_validate(
        {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    )
    assert rules_of(body).one_call is one_call


def test_one_call_ends_an_answer_that_may_have_no_more(speaker: Callable[[str], Speaker]) -> None:
    answer = speaker(QWEN25).say(f"{CALL}\n{CALL} more", ASK, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(answer.message.tool_calls) == 1
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"


def test_without_tools_or_with_none_to_choose_all_is_text(speaker: Callable[[str], Speaker]) -> None:
    for wishes in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole = speaker(QWEN25).server.client()
        speaker(QWEN25).answer = CALL
        with whole as client:
            body = {"messages": ASK, "max_tokens": 500, **wishes}
            answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")


def test_thinking_is_told_from_the_answer_and_counted(speaker: Callable[[str], Speaker]) -> None:
    answer = f"Let me think.\n</think>\n\nYes.{CALL}"
    model = speaker(QWEN3_THINKING)
    whole = model.say(answer, ASK, tools=TOOLS)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me think.", "Yes.")
    assert whole.usage.completion_tokens == len(model.server.tokenizer.encode(answer)) + 1  # that which ended it
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("Let me think.\n</think>")


@pytest.mark.parametrize(
    ("answer", "lists"),
    [
        (f"Let me think.\n</think>\n\nYes. {CALL}\n", ["Yes. ", "Let me think.\n</think>\n\n", f"{CALL}\n"]),
        (f"I </th\n</think>{CALL}\n{CALL}", ["", "I </th\n</think>", f"{CALL}\n{CALL}"]),
        ("é</think>\n <tool_call>no ", ["<tool_call>no ", "é</think>\n ", ""]),
    ],
)
def test_each_token_is_scored_with_what_it_belongs_to(
    speaker: Callable[[str], Speaker], answer: str, lists: list[str]
) -> None:
    whole = speaker(QWEN3_THINKING).say(answer, ASK, tools=TOOLS, logprobs=True)
    scores = whole.choices[0].logprobs
    assert [spelled(tokens) for tokens in (scores.content, scores.reasoning_content, scores.tool_calls)] == lists
    assert (
        sum(map(len, (scores.content, scores.reasoning_content, scores.tool_calls)))
        == whole.usage.completion_tokens - 1
    )


def spelled(tokens: list[Any]) -> str:
    parts = (token["bytes"] if isinstance(token, dict) else token.bytes for token in tokens)
    return bytes(byte for part in parts for byte in part).decode()


def test_thinking_may_be_left_out_or_left_in_the_text(speaker: Callable[[str], Speaker]) -> None:
    model, answer = speaker(QWEN3), f"<think>\nHm.\n</think>\n\nYes.{CALL}"
    without = model.say(answer, ASK, tools=TOOLS, logprobs=True, extra_body={"include_reasoning": False})
    message, scores = without.choices[0].message, without.choices[0].logprobs
    assert (message.content, getattr(message, "reasoning_content", None), scores.reasoning_content) == (
        "Yes.",
        None,
        [],
    )
    assert without.usage.completion_tokens_details.reasoning_tokens > 0
    said = model.say(answer, ASK, tools=TOOLS, extra_body={"separate_reasoning": False}).choices[0].message
    assert (said.content, len(said.tool_calls)) == ("<think>\nHm.\n</think>\n\nYes.", 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("wish", "thinks"),
    [({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True), ({"enable_thinking": False}, False),
     ({"thinking": {"type": "disabled"}}, False), ({"chat_template_kwargs": {"thinking": False}}, False), ({}, True)],
)  # fmt: skip
def test_whether_to_think_reaches_the_template(
    speaker: Callable[[str], Speaker], wish: dict[str, Any], thinks: bool
) -> None:
    model = speaker(QWEN3)
    model.say("Yes.", ASK, extra_body=wish)
    assert ("</think>" not in model.prompt()) == thinks


EFFORT = {
    "/v1/chat/completions": {"messages": ASK, "reasoning_effort": "low"},
    "/v1/messages": {"messages": ASK, "max_tokens": 99, "output_config": {"effort": "low"}},
    "/v1/responses": {"input": ASK, "reasoning": {"effort": "low"}},
}


@pytest.mark.parametrize("template", [QWEN25, QWEN3_THINKING])
def test_effort_that_the_template_does_not_read_is_ignored_and_named(
    speaker: Callable[[str], Speaker], template: str
) -> None:
    """opencode sends one with its request for a title, Claude Code the one that its user has chosen."""
    model = speaker(template)
    model.answer = "Yes."
    with model.server.client() as client:
        for path, body in EFFORT.items():
            answer = client.post(path, json={"model": "tiny", **body})
            assert (answer.status_code, answer.headers["x-forebay-ignored"]) == (200, "reasoning_effort"), answer.text


@pytest.mark.parametrize(
    ("template", "wish", "param", "words"),
    [
        (QWEN25, {"enable_thinking": True}, "enable_thinking", "does not think"),
        (QWEN3_THINKING, {"enable_thinking": False}, "enable_thinking", "thinks before each answer"),
        (QWEN3_THINKING, {"reasoning_effort": "none"}, "reasoning_effort", "thinks before each answer"),
    ],
)
def test_what_the_template_cannot_say_of_thinking_is_refused(
    speaker: Callable[[str], Speaker], template: str, wish: dict[str, Any], param: str, words: str
) -> None:
    with speaker(template).server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, **wish})
        info = client.get("/server_info").json()["answers"]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_field", param)
    assert words in error["message"]
    assert info["tool_calls"] == "hermes"
    assert "probe_tool" in info["evidence"]["tool_calls"]


DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "[[", "close": "]]"},
        "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True,
                       "transform": {"type": "function", "function": "{content}"}},
        "content": {"close": "<|im_end|>"},
    },
}  # fmt: skip


def test_format_that_the_checkpoint_declares_is_read_enforced_and_named(patience: None) -> None:
    model = Speaker(QWEN25, declared=DECLARED)
    try:
        call = '<<{"name": "get_weather", "arguments": {"city":  "Oslo"}}>>'
        message = model.say(f"[[hm]]Look.{call}{call}", list(ASK), tools=TOOLS).choices[0].message
        assert (message.content, message.reasoning_content) == ("Look.", "hm")
        assert [each.function.arguments for each in message.tool_calls] == ['{"city":  "Oslo"}'] * 2
        model.say(call, list(ASK), tools=TOOLS, tool_choice="required")
        grammar = model.server.engine.submitted[-1].params.grammar
        assert grammar is not None
        assert '\\"<<\\"' in grammar.text
        with model.server.client() as client:
            info = client.get("/server_info").json()["answers"]
        assert (info["tool_calls"], info["reasoning"]) == ("declared", "declared")
        assert "response_template" in info["evidence"]["tool_calls"]
    finally:
        model.server.close()


async def test_the_asynchronous_clients_own_stream_puts_the_same_answers_together(
    speaker: Callable[[str], Speaker],
) -> None:
    model, messages = speaker(QWEN3_THINKING), list(ASK)
    options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "max_tokens": 500}
    url = f"{model.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=HANGS_S) as api:
        for said in (CALL, f"Both.{CALL}{CALL}", "Sunny."):
            model.answer = f"Hm.</think>{said}"
            whole = (await api.chat.completions.create(messages=messages, **options)).choices[0]
            async with api.chat.completions.stream(messages=messages, **options) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            assert streamed.finish_reason == whole.finish_reason
            assert (streamed.message.content or "") == (whole.message.content or "")
            assert streamed.message.reasoning_content == whole.message.reasoning_content == "Hm."
            calls = [message.tool_calls or [] for message in (streamed.message, whole.message)]
            assert len(calls[0]) == said.count("<tool_call>")
            assert [(call.function.name, call.function.arguments) for call in calls[0]] == [
                (call.function.name, call.function.arguments) for call in calls[1]
            ]
            messages.append(whole.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in calls[1]]
    assert model.prompt().count("<tool_response>\nsun") == 3


@pytest.mark.parametrize(("template", "content"), [(QWEN3, "So."), (GPT_OSS, None), (GPT_OSS, "So.")])
def test_what_was_thought_before_a_call_goes_back_to_the_template(
    speaker: Callable[[str], Speaker], template: str, content: str | None
) -> None:
    model = speaker(template)
    calls = [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]
    answer = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": calls}
    with model.server.client() as client:
        messages = [*ASK, answer, {"role": "tool", "tool_call_id": "c", "content": "sun"}]
        told = client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 1})
    assert told.status_code == 200, told.text
    assert ("Hm." in model.prompt()) == (template == QWEN3 or content is None)


SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
BOTH = [*TOOLS, {"type": "function", "function": SEARCH}]
STRICT = [{"type": "function", "function": {**SEARCH, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "search"}}


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("wishes", "takes", "refuses"),
    [
        ({"tools": BOTH, "tool_choice": "required"}, [call_of("get_weather", "{}"), call_of("search", '{"n":1}')],
         ["Yes.", call_of("search", '{"n":"x"}'), call_of("other", "{}")]),
        ({"tools": BOTH, "tool_choice": NAMED}, [call_of("search", "{}")], [call_of("get_weather", "{}"), "No."]),
        ({"tools": STRICT}, ["Yes.", f"So: {call_of('search', '{}')}"], [call_of("search", '{"n":true}')]),
        ({"response_format": {"type": "json_object"}}, ["{}"], ["Yes."]),
    ],
    ids=["required", "named", "strict", "form"],
)  # fmt: skip
def test_what_must_be_called_is_enforced_behind_the_thinking(
    speaker: Callable[[str], Speaker], wishes: dict[str, Any], takes: list[str], refuses: list[str]
) -> None:
    model = speaker(QWEN3_THINKING)
    with model.server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, **wishes})
    assert answer.status_code == 200, answer.text
    grammar, tokenizer = model.server.engine.submitted[-1].params.grammar, model.server.tokenizer
    start = compiled(grammar, tiny_vocabulary())
    for text, fits in [*((text, True) for text in takes), *((text, False) for text in refuses)]:
        matcher, tokens = start.deep_copy(), tokenizer.encode(f"Hm. {{}}\n</think>\n\n{text}")
        whole = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        assert (whole and matcher.is_accepting()) == fits, text


@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {**SEARCH, "parameters": {"$ref": "#/no"}, "strict": True}}]},
         "tools.0.function.parameters", "/no"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens", "cannot be forced"),
        ({"tools": BOTH, "tool_choice": {**NAMED, "function": {"name": "no"}}}, "tool_choice.function.name", "no tool"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(
    speaker: Callable[[str], Speaker], wishes: dict[str, Any], param: str, words: str
) -> None:
    with speaker(QWEN3_THINKING).server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, **wishes})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("name", "fits"), [("mcp.server-a_" + "n" * 115, True), ("n" * 129, False), ("a b", False), ("", False)]
)
def test_name_of_a_tool_may_have_128_characters_in_every_dialect(name: str, fits: bool) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    choice = {"type": "function", "function": {"name": name}}
    chat = {"messages": ASK, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
    called = {"type": "tool", "name": name}
    messages = {"model": "m", "messages": ASK, "max_tokens": 1, "tool_choice": called}
    bodies: list[tuple[type[Strict], dict[str, Any]]] = [
        (ChatRequest, chat),
        (MessagesRequest, {**messages, "tools": [{"name": name, "input_schema": {"type": "object"}}]}),
        (
            ResponsesRequest,
            {
                "input": "x",
                "tools": [{"type": "function", **function}],
                "tool_choice": {"type": "function", "name": name},
            },
        ),
        (OllamaChatRequest, {"model": "m", "messages": ASK, "tools": chat["tools"]}),
    ]
    for kind, body in bodies:
        if fits:
            kind.parse(body)
            continue
        with pytest.raises(InvalidRequest, match="name"):
            kind.parse(body)
