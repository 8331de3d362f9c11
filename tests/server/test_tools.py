"""Tools and thinking as the official client knows them, of an engine that says what models say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from forebay.requests.sampling_params import SamplingParams
from forebay.text.answers.probes import find_formats
from tests.deadlines import HANGS_S
from tests.server.conftest import MODEL, start
from tests.server.fake_engine import FakeEngine
from tests.text.answers.test_probes import HERMES
from tests.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer

THINKING = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
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
ASK: list[Any] = [{"role": "user", "content": "How is it?"}]


class Speaker:
    """A server whose model says `answer`."""

    def __init__(self, template: str) -> None:
        self.answer = ""
        tokenizer = tiny_tokenizer(template=template)

        def script(prompt: list[int], params: SamplingParams) -> list[int]:
            return tokenizer.encode(self.answer)

        model = replace(MODEL, answers=find_formats(tokenizer))
        self.server = start(tokenizer, lambda: FakeEngine(script, width=3), model=model)

    def prompt(self) -> str:
        stream = self.server.engine.submitted[-1]
        return self.server.tokenizer.decode(stream.prompt, skip_special_tokens=False)

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


@pytest.mark.parametrize("template", [HERMES, TEMPLATE], ids=["template", "told in text"])
def test_tools_are_called_over_three_turns(speaker: Callable[[str], Speaker], template: str) -> None:
    model, messages = speaker(template), list(ASK)
    for _ in range(2):
        answer = model.say(f"Let me look.\n{CALL}\n{CALL}", messages, tools=TOOLS).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "Let me look."
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
    answer = speaker(HERMES).say(CALL, ASK, tools=TOOLS).choices[0]
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"


def test_one_call_ends_an_answer_that_may_have_no_more(speaker: Callable[[str], Speaker]) -> None:
    answer = speaker(HERMES).say(f"{CALL}\n{CALL} more", ASK, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(answer.message.tool_calls) == 1
    assert answer.message.content is None
    assert answer.finish_reason == "tool_calls"


def test_without_tools_or_with_none_to_choose_all_is_text(speaker: Callable[[str], Speaker]) -> None:
    for wishes in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole = speaker(HERMES).server.client()
        speaker(HERMES).answer = CALL
        with whole as client:
            body = {"messages": ASK, "max_tokens": 500, **wishes}
            answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")


def test_thinking_is_told_from_the_answer_and_counted(speaker: Callable[[str], Speaker]) -> None:
    whole = speaker(THINKING).say(f"Let me think.\n</think>\n\nYes.{CALL}", ASK, tools=TOOLS, logprobs=True)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me think.", "Yes.")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("Let me think.\n</think>")
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens - 1  # that which ended it has none


def test_an_effort_that_the_template_does_not_know_is_refused(speaker: Callable[[str], Speaker]) -> None:
    with speaker(HERMES).server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, "reasoning_effort": "high"})
        info = client.get("/server_info").json()["answers"]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
    assert info["tool_calls"] == "hermes"
    assert "probe_tool" in info["evidence"]["tool_calls"]
