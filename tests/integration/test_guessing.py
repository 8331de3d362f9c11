"""A real server that guesses beside one that does not: the same answers, and figures of what it gained (C16)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import loopback
from tests.deadlines import wait_until
from tests.engine.conftest import make_chat_model
from tests.integration.tree import Tree, serving

QUOTED = "the quick brown fox jumps over the lazy dog and runs into the dark wood"
MESSAGES = [{"role": "user", "content": f"Repeat five times, word for word: {QUOTED}"}]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "sampled, several": {"temperature": 0.8, "seed": 3, "n": 3, "logprobs": True},
    "penalized": {"temperature": 0.7, "seed": 4, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "stop string": {"temperature": 0, "stop": [" lazy dog and"]},
    "stop tokens": {"temperature": 0, "stop_token_ids": [2, 28], "logprobs": True},
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tree]]:
    """Servers of a random model, which repeats itself when it is greedy."""
    folder = tmp_path_factory.mktemp("guessing")
    model = make_chat_model(folder / "model", context_length=1024).path
    flags = ("--dtype=float32", "--max-running-requests=4", "--kv-cache-bytes=4MiB", "--context-length=1024")
    with (
        serving(folder / "off", model, *flags, "--speculative-algorithm=off") as off,
        serving(folder / "ngram", model, *flags, "--speculative-algorithm=NGRAM") as ngram,
    ):
        yield {"off": off, "NGRAM": ngram}


def ask(tree: Tree, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "max_tokens": 48, **fields}
    return loopback.post(f"{tree.url}/v1/chat/completions", json=body)


def streamed(answer: httpx.Response) -> dict[int, str]:
    texts: dict[int, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
def test_c16_answers_are_those_of_a_server_that_does_not_guess(trees: dict[str, Tree], fields: dict[str, Any]) -> None:
    expected, answer = (ask(tree, **fields).json() for tree in trees.values())
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    texts = streamed(ask(trees["NGRAM"], **fields, stream=True))
    assert texts == {choice["index"]: choice["message"]["content"] for choice in expected["choices"]}


def test_a_client_that_leaves_in_the_middle_gives_everything_back(trees: dict[str, Tree]) -> None:
    tree = trees["NGRAM"]
    body = {"messages": MESSAGES, "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 2}
    with loopback.stream("POST", f"{tree.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    assert ask(tree, temperature=0).json()["choices"]

    def nothing_is_held() -> bool:
        pools = loopback.get(f"{tree.url}/debug/state").json()["pools"]
        return all(pool["running"] == 0 for pool in pools)

    wait_until(nothing_is_held)


def test_what_was_gained_is_told(trees: dict[str, Tree]) -> None:
    tree = trees["NGRAM"]
    ask(tree, temperature=0)
    text = loopback.get(f"{tree.url}/metrics").text
    values = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    assert values["forebay:engine_accepted_tokens"] > 0
    assert values["forebay:spec_accept_length"] > 1
    assert values["forebay:spec_net_speedup"] > 0
    assert values["forebay:spec_width"] in (1, 8)
    off = loopback.get(f"{trees['off'].url}/metrics").text
    assert "spec_" not in off
