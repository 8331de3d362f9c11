"""/generate as SGLang's clients know it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from forebay.server.api.sglang.generate import NativeRequest
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.test_refusals import assert_said
from tests.text.tiny_tokenizer import tiny_tokenizer

SAID = "hello world STOP more"


@pytest.fixture(scope="module")
def speaking(patience: None) -> Iterator[Running]:
    tokenizer = tiny_tokenizer()
    server = start(tokenizer, lambda: FakeEngine(lambda prompt, params: tokenizer.encode(SAID), width=2))
    yield server
    server.close()


def ask(server: Running, **body: Any) -> Any:
    with server.client() as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_text_comes_with_what_is_known_of_it_whole_and_streamed(speaking: Running) -> None:
    params = {"max_new_tokens": 90, "temperature": 0, "stop": "STOP", "sampling_seed": 3}
    body = {"text": "hi", "rid": "mine", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 1}
    whole = ask(speaking, **body).json()
    meta = whole["meta_info"]
    assert (whole["text"], meta["id"], meta["finish_reason"]) == (
        "hello world ", "mine", {"type": "stop", "matched": "STOP"},
    )  # fmt: skip
    tokens = speaking.tokenizer.encode("hello world ")
    assert whole["output_ids"] == tokens
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in tokens]
    assert [len(top) for top in meta["output_top_logprobs"]] == [1] * len(tokens)
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (2, 1)
    lines = ask(speaking, **body, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert all(later["text"].startswith(event["text"]) for event, later in pairwise(events))
    for last in (events[-1], whole):
        last["meta_info"].pop("e2e_latency")
    assert events[-1] == whole
    assert speaking.engine.submitted[-1].params.seed == 3


def test_several_prompts_and_choices_are_answered_in_a_list(speaking: Running) -> None:
    ids = speaking.tokenizer.encode("hi")
    found = ask(speaking, input_ids=[ids, ids], sampling_params={"n": 2, "max_new_tokens": 3}).json()
    assert [one["meta_info"]["finish_reason"]["type"] for one in found] == ["length"] * 4
    assert len({one["meta_info"]["id"] for one in found}) == 4
    assert isinstance(ask(speaking, input_ids=ids).json(), dict)


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        ({}, "missing_field", "text", "either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "invalid_combination", "text", "send one of them"),
        ({"text": [5]}, "invalid_combination", "text", "for the other"),
        ({"input_ids": "a"}, "invalid_combination", "input_ids", "for the other"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "invalid_value", "sampling_params.top_p", "above 0"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "invalid_value", "sampling_params.stop_regex",
         "closed"),
        ({"text": "a", "sampling_params": {"spaces_between_special_tokens": False}}, "unsupported_field",
         "sampling_params.spaces_between_special_tokens", "leave it out"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "invalid_combination",
         "sampling_params.ebnf", "send one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_the_clients_own_names(
    body: dict[str, Any], code: str, param: str, words: str
) -> None:
    assert_said(NativeRequest, body, code, param, words)
