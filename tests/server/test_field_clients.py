"""Fields and routes of /v1 that current clients and the suites of other engines use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.test_responses import Model
from tests.server.test_tools import ASK
from tests.text.answers.templates import QWEN3_THINKING, QWEN25


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Model]:
    made = Model(QWEN25)
    made.answer = "Well then."
    yield made
    made.close()


def post(server: Running, path: str, **body: Any) -> Any:
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_chat_stream_first_delta_has_a_role_and_no_content(model: Model) -> None:
    first, second, *_ = events(post(model.server, "/v1/chat/completions", messages=ASK, stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    assert second["choices"][0]["delta"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_asked_for_are_those_of_prompt_and_answer(model: Model, path: str, stream: bool) -> None:
    chat = path.startswith("/v1/chat")
    asked = {"messages": ASK} if chat else {"prompt": ["One", "Two"]}
    body = {**asked, "max_tokens": 5, "n": 2, "return_token_ids": True, "stream": stream}
    answer = post(model.server, path, **body)
    streams = model.server.engine.submitted[-(2 if chat else 4) :]
    expected = [(each.prompt, model.server.tokenizer.encode("Well then.")[:5]) for each in streams]
    if not stream:
        whole = answer.json()
        prompts = [whole["prompt_token_ids"]] * 2 if chat else [c["prompt_token_ids"] for c in whole["choices"]]
        found = [(prompt, choice["token_ids"]) for prompt, choice in zip(prompts, whole["choices"], strict=True)]
    else:
        told = events(answer)
        choices = [choice for event in told for choice in event["choices"]]
        ids: list[list[int]] = [[] for _ in expected]
        for choice in choices:
            ids[choice["index"]] += choice["token_ids"]
        if chat:
            (prompt,) = [event["prompt_token_ids"] for event in told if "prompt_token_ids" in event]
            prompts = [prompt] * 2
        else:
            prompts = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
        found = list(zip(prompts, ids, strict=True))
    assert found == expected
    plain = post(model.server, path, **{**body, "return_token_ids": False})
    assert "token_ids" not in plain.text


def test_responses_log_probabilities_come_whole_and_streamed(model: Model) -> None:
    for wishes in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        whole = model.ask("Well then.", **wishes)  # streamed and whole are the same
        (part,) = whole.output[0].content
        assert "".join(entry.token for entry in part.logprobs) == "Well then."
        assert {len(entry.top_logprobs) for entry in part.logprobs} == {wishes.get("top_logprobs", 0)}
        told = list(model.api.responses.create(model="tiny", input="x", stream=True, **wishes))
        deltas = [entry for event in told if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert [entry.to_dict() for entry in deltas] == [entry.to_dict() for entry in part.logprobs]


def test_responses_top_k_reaches_the_engine(model: Model) -> None:
    post(model.server, "/v1/responses", input="x", top_k=7)
    assert model.server.engine.submitted[-1].params.top_k == 7


def test_responses_history_ends_with_reasoning_is_answered(patience: None) -> None:
    """An answer cut off within its thinking, sent back."""
    thinker = Model(QWEN3_THINKING)
    try:
        thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
        thinker.answer = "</think>Yes."
        for items in ([{"role": "user", "content": "Hello."}, thought], [thought, {"role": "user", "content": "So?"}]):
            post(thinker.server, "/v1/responses", input=items)
        talk = [*ASK, {"role": "assistant", "content": None, "reasoning_content": "Hm"}, *ASK]
        post(thinker.server, "/v1/chat/completions", messages=talk)
        assert "Hm" in thinker.prompt()
    finally:
        thinker.close()


def test_responses_input_tokens_are_those_of_the_prompt(model: Model) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    asked: Any = {"model": "tiny", "input": "How is it?", "instructions": "Be brief.", "tools": tools}
    counted = model.api.responses.input_tokens.count(**asked)
    answer = model.api.responses.create(**asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "verbosity": "low"}),
        ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}),
    ],
)
def test_verbosity_is_counted_as_ignored_unless_the_template_reads_it(model: Model, path: str, body: Any) -> None:
    assert post(model.server, path, **body).headers["x-forebay-ignored"] == "verbosity"
    reads = Model("{% if verbosity is defined %}[{{ verbosity }}]{% endif %}" + QWEN25)
    try:
        assert "x-forebay-ignored" not in post(reads.server, path, **body).headers
        assert "[low]" in reads.prompt()
    finally:
        reads.close()


def test_tokenizer_info_has_what_lm_eval_reads(model: Model) -> None:
    with model.server.client() as http:
        told = http.get("/tokenizer_info").json()
    assert told["eos_token"] == "<|im_end|>"
    assert told["chat_template"] == QWEN25
    assert told["model_max_length"] == model.server.engine.info.context_length
