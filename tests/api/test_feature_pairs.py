"""Scorecard D-2: every two features of a request together, over a real model. What a request brings does not depend on
whether it is streamed, nor on what runs beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import httpx
import pytest
import torch

from forebay.text.tokenizer import Tokenizer
from tests import loopback
from tests.engine.conftest import make_chat_model
from tests.fuzz.mutants import seeds
from tests.integration.rig import Rig
from tests.integration.threaded import ThreadedEngine
from tests.kernels import NATIVE
from tests.pairs import Row, all_pairs
from tests.server.conftest import Running, start

CONTEXT = 256
VOCAB = 258
OPTIONS: dict[str, list[Any]] = {
    "chat": [False, True],
    "prompt": ["short", "long", "ids", "two"],
    "stream": [None, {}, {"include_usage": True}],
    "n": [None, 1, 3],
    "max_tokens": [1, 2, 17],
    "seed": [0, 7, 2**62],
    "temperature": [0, 0.8, 1.7],
    "filter": [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": -1, "top_p": 1}],
    "penalty": [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 1.2, "presence_penalty": -0.7}],
    "logit_bias": [None, {"5": 100}, {"7": -100, "20": 3.5}],
    "restriction": [{}, {"bad_words": ["a", "the"]}, {"allowed_token_ids": list(range(30, 130)), "min_tokens": 1}],
    "logprobs": [None, 0, 3],
    "stop": [None, "e", ["a", "zz", "é"], []],
    "stop_token_ids": [None, list(range(100, 140))],
    "include_stop_str_in_output": [False, True],
    "ignore_eos": [False, True],
    "echo": [False, True],
    "cache_salt": [None, "one", "two"],
    "priority": [0, 5],
    "label": [{}, {"user": "u", "metadata": {"a": "b"}}, {"response_format": {"type": "text"}, "tools": []}],
}
PROMPTS: dict[str, Any] = {
    "short": "a",
    "long": "The quick brown fox jumps over the lazy dog. " * 2,
    "ids": [30, 31, 32, 33, 34, 35, 36],
    "two": ["one", [40, 41, 42]],
}


@dataclass
class Heard:
    """A choice, however it came."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        assert not self.finish, f"more after the finish: {choice}"
        said = choice.get("delta") or choice.get("message") or {}
        self.text += choice.get("text") or said.get("content") or ""
        if choice["logprobs"]:
            scored = choice["logprobs"]
            entries = scored.get("content")
            self.tokens += scored["tokens"] if entries is None else [entry["token"] for entry in entries]
            self.scores += scored["token_logprobs"] if entries is None else [entry["logprob"] for entry in entries]
        if choice["finish_reason"]:
            self.finish.append(choice["finish_reason"])


def body_of(row: Row) -> tuple[str, dict[str, Any]]:
    """A path and a body; features that one of the two routes does not have are left out there."""
    taken = {"max_tokens", "n", "seed", "temperature", "logit_bias", "stop", "stop_token_ids"}
    taken |= {"include_stop_str_in_output", "ignore_eos", "cache_salt", "priority"}
    body = {name: row[name] for name in taken} | row["filter"] | row["penalty"] | row["restriction"] | row["label"]
    if row["chat"]:
        text = row["prompt"] if row["prompt"] in ("ids", "two") else PROMPTS[row["prompt"]]
        body["messages"] = [{"role": "system", "content": "be"}, {"role": "user", "content": text}]
        if row["logprobs"] is not None:
            body |= {"logprobs": True, "top_logprobs": row["logprobs"]}
        return "/v1/chat/completions", body
    body |= {"prompt": PROMPTS[row["prompt"]], "echo": row["echo"], "logprobs": row["logprobs"]}
    return "/v1/completions", body


async def heard(client: httpx.AsyncClient, row: Row, *, streamed: bool) -> tuple[list[Heard], dict[str, Any] | None]:
    """The choices, and the usage where it was told."""
    path, body = body_of(row)
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": bool(row["stream"])}}
    response = await client.post(path, json=body)
    if streamed and row["echo"] and row["logprobs"] is not None and not row["chat"]:
        assert response.status_code == 400, response.text
        return [], None
    assert response.status_code == 200, (row, response.text)
    if streamed:
        *events, done = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        assert done == "[DONE]"
        chunks = [json.loads(event) for event in events]
    else:
        chunks = [response.json()]
    choices: dict[int, Heard] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], Heard()).take(choice)
    return [choices[index] for index in sorted(choices)], chunks[-1].get("usage")


def check(row: Row, choices: list[Heard], usage: dict[str, Any] | None) -> None:
    num_prompts = 2 if row["prompt"] == "two" and not row["chat"] else 1
    assert len(choices) == num_prompts * (row["n"] or 1)
    for choice in choices:
        assert choice.finish in (["stop"], ["length"])
    if usage is None:
        return
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["cache"]["cached_tokens"] <= usage["prompt_tokens"]
    assert len(choices) <= usage["completion_tokens"] <= row["max_tokens"] * len(choices)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny random llama behind the real core, runner, channel and HTTP server."""
    folder = make_chat_model(tmp_path_factory.mktemp("model"), context_length=CONTEXT).path
    rig = Rig(folder, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=CONTEXT)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    shape = {"page_size": 4, "num_tokens": 640, "chunked_prefill_size": 16, "schedule_conservativeness": 0.1}
    core = rig.engine(**shape, radix_cache=True, overlap_depth=1).core
    engine = ThreadedEngine(core, max_running_requests=16, context_length=CONTEXT, vocab_size=VOCAB)
    running = start(Tokenizer.from_path(folder), engine.connect)
    yield running
    running.close()
    assert engine.failure is None
    core.scheduler.audit()


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(1, 20))
async def test_d2_c28_any_two_features_go_together(server: Running, seed: int) -> None:
    rows = all_pairs(OPTIONS, seed)
    limits = httpx.Limits(max_connections=12)
    async with loopback.async_client(base_url=server.url, limits=limits) as client:
        alone = [await heard(client, row, streamed=False) for row in rows]
        for row, (choices, usage) in zip(rows, alone, strict=True):
            check(row, choices, usage)
        together = await asyncio.gather(*(heard(client, row, streamed=row["stream"] is not None) for row in rows))
    for row, (choices, usage), (same, more) in zip(rows, alone, together, strict=True):
        if not same:
            continue  # refused
        check(row, same, more)
        assert same == choices, row
        if usage and more:
            assert more["completion_tokens"] == usage["completion_tokens"]
    server.until(lambda: server.engine.link.num_requests == 0)


HI = {"role": "user", "content": "hi"}


def ask(server: Running, path: str, **body: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def test_no_end_comes_before_the_least_length(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 9, "temperature": 0, "stop_token_ids": list(range(1, 250)), "stop": ["q"]}
    lengths = [
        ask(server, "/v1/completions", **body, min_tokens=least)["usage"]["completion_tokens"] for least in (0, 4, 9)
    ]
    assert lengths == [1, 5, 9]


def test_a_bad_word_is_not_said_and_what_is_allowed_alone_is(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    (said,) = ask(server, "/v1/completions", **body)["choices"]
    bad = [word for token in said["logprobs"]["tokens"] if (word := token).isascii() and "\\" not in token]
    (other,) = ask(server, "/v1/completions", **body, bad_words=bad)["choices"]
    assert not set(bad) & set(other["logprobs"]["tokens"])
    (allowed,) = ask(server, "/v1/completions", **body, allowed_token_ids=[70, 71])["choices"]
    spelled = ask(server, "/detokenize", tokens=[70, 71])["prompt"]
    assert set(allowed["logprobs"]["tokens"]) <= set(spelled)


def test_what_the_assistant_said_last_is_gone_on_with_where_it_ends(server: Running) -> None:
    talk = [HI, {"role": "assistant", "content": "Sure: "}]
    whole = ask(server, "/tokenize", messages=talk, add_generation_prompt=False)["tokens"]
    begun = ask(server, "/tokenize", messages=talk, continue_final_message=True)["tokens"]
    assert begun == whole[: len(begun)]
    assert ask(server, "/detokenize", tokens=begun)["prompt"].endswith("Sure: ")
    chat = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = ask(server, "/v1/chat/completions", messages=talk, continue_final_message=True, **chat)
    right = ask(server, "/v1/completions", prompt=begun, **chat)
    assert answer["choices"][0]["message"]["content"] == right["choices"][0]["text"]
    with server.client() as client:
        body = {"messages": [HI], "continue_final_message": True}
        refused = client.post("/v1/chat/completions", json=body).json()["error"]
    assert refused["param"] == "continue_final_message"


def test_a_chats_prompt_has_the_log_probabilities_of_its_tokens_though_they_are_cached(server: Running) -> None:
    wishes = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    ids = ask(server, "/tokenize", messages=[HI])["tokens"]
    (right,) = ask(server, "/v1/completions", prompt=ids, **wishes)["choices"]
    for _ in range(2):
        answer = ask(server, "/v1/chat/completions", messages=[HI], **wishes)
        assert answer["prompt_logprobs"] == right["prompt_logprobs"]
        assert len(answer["prompt_logprobs"]) == len(ids)
        assert answer["usage"]["cache"]["miss_reason"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("path", "source"), [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [HI]})]
)
def test_each_event_has_the_usage_so_far_where_that_is_wanted(server: Running, path: str, source: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**source, "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
    with server.client() as client:
        lines = client.post(f"/v1/{path}", json=body).text.split("\n\n")
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines if line.startswith("data: {")]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_all_pairs_are_there() -> None:
    options = {"a": [1, 2, 3], "b": [None, "x"], "c": [[], {}], "d": [0, 1, 2, 3]}
    rows = all_pairs(options)
    for (a, left), (b, right) in combinations(options.items(), 2):
        for value in left:
            assert all(any(row[a] == value and row[b] == other for row in rows) for other in right)
    assert 12 <= len(rows) <= 18  # of 48
