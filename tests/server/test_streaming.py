"""Scorecard C-7: what is streamed, joined, is what is not streamed."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from forebay.requests.sampling_params import SamplingParams
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine

SEEDS = 25  # per test
TEXT = "hello world, 🎉 é 日本 STOP and hello again"


def speak(prompt: list[int], params: SamplingParams) -> list[int]:
    """Text cut into bytes and words as it comes, sometimes ended by the end token."""
    rng = random.Random(params.seed)
    ids: list[int] = []
    while len(ids) < params.max_tokens:
        ids += rng.choice([[3 + byte for byte in TEXT.encode()], [262, 260, 35], [rng.randrange(3, 259)]])
    return [*ids[: rng.randint(1, 80)], 2]


@pytest.fixture(scope="module")
def server(tokenizer) -> Any:
    running = start(tokenizer, lambda: FakeEngine(speak))
    yield running
    running.close()


@pytest.fixture(scope="module")
def wide(tokenizer) -> Any:
    running = start(tokenizer, lambda: FakeEngine(speak, width=4))
    yield running
    running.close()


def read_stream(lines: list[str]) -> tuple[dict[int, str], dict[int, str], dict[str, Any], dict[int, list[str]]]:
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    usage: dict[str, Any] = {}
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ends  # nothing after the finish
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice["logprobs"]:
                tokens.setdefault(index, []).extend(entry["token"] for entry in choice["logprobs"]["content"])
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    return texts, ends, usage, tokens


@pytest.mark.quick(1)
@pytest.mark.parametrize("block", range(40))
def test_stream_equals_whole(server: Running, block: int) -> None:
    with server.client() as http:
        for seed in range(block * SEEDS, (block + 1) * SEEDS):
            assert_stream_equals_whole(server, http, seed)
    server.until(lambda: not server.engine.running)


def asked(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "messages": [{"role": "user", "content": "hello"}],
        "seed": seed,
        "n": rng.randint(1, 3),
        "max_tokens": rng.randint(1, 60),
        "stop": rng.sample(["STOP", "🎉", "world,", " again", "\ufffd"], rng.randint(0, 2)),
        "logprobs": rng.random() < 0.5,
    }


def assert_stream_equals_whole(server: Running, http: httpx.Client, seed: int) -> None:
    body = asked(seed)
    whole = http.post("/v1/chat/completions", json=body).json()
    answer = http.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    texts, ends, usage, tokens = read_stream([line for line in answer.text.split("\n") if line])
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["message"]["content"]
        assert ends[index] == choice["finish_reason"]
        assert not any(stop in texts[index] for stop in body["stop"])
        if body["logprobs"]:
            assert tokens.get(index, []) == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert usage == whole["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def answered(whole: dict[str, Any]) -> Any:
    return whole["choices"], whole["usage"]


@pytest.mark.long
def test_c16_what_is_streamed_does_not_depend_on_how_many_tokens_a_step_brings(server: Running, wide: Running) -> None:
    """Stop strings and ends inside a step's tokens cut them there; nothing behind is shown, scored or counted."""
    with server.client() as http, wide.client() as several:
        for seed in range(SEEDS):
            expected = http.post("/v1/chat/completions", json=asked(seed)).json()
            answer = several.post("/v1/chat/completions", json=asked(seed)).json()
            assert answered(answer) == answered(expected)
            assert_stream_equals_whole(wide, several, seed)
        wide.until(lambda: not wide.engine.running)


def test_a_step_s_tokens_are_one_event(wide: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "seed": 1, "stream": True, "ignore_eos": True}
    with wide.client() as http:
        lines = [line for line in http.post("/v1/completions", json=body).text.split("\n") if line]
    stream = wide.engine.submitted[-1]
    assert stream.sent == 9
    assert len(lines) < 9


def test_end_token_is_counted_but_is_no_text(server: Running) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 500, "seed": 3}).json()
    stream = server.engine.submitted[-1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == stream.sent
    assert "<|im_end|>" not in answer["choices"][0]["text"]
