"""The server for peers that have none, driven by the client that measures it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.peers import completions
from forebay.base.http_client import Origin, get_json, post_json
from forebay.bench.load import Load, Run, Target, run_load


class Counting:
    """Generates 5, 6, 7... for each request at once, two tokens a step, and ends after `most`."""

    def __init__(self, deliver: completions.Deliver, most: int) -> None:
        self._deliver, self._most = deliver, most

    def submit(self, request: completions.Request) -> None:
        tokens = list(range(5, 5 + min(self._most, request.max_tokens)))
        for first in range(0, len(tokens), 2):
            self._deliver([(request, tokens[first : first + 2])])
        self._deliver([(request, [completions.END])])

    def text(self, token: int) -> str:
        return f" {token}"

    def ids(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    engine = Counting(completions.Deliver(), most=20)
    server = await asyncio.start_server(
        lambda reader, writer: completions.connection(reader, writer, engine, "peer"), "127.0.0.1", 0
    )
    yield Origin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await asyncio.sleep(0)


async def load(origin: Origin, num_prompts: int, output_length: int) -> Run:
    prompts = [[1, 2, 3] for _ in range(num_prompts)]
    return await run_load(Target(origin, "peer", output_length, True), Load(prompts, float("inf"), 4, 0), lambda: None)


async def test_every_token_is_an_event_and_usage_counts_them(origin: Origin) -> None:
    done = await load(origin, num_prompts=6, output_length=7)
    assert [sample.error for sample in done.samples] == [""] * 6
    assert {(s.num_prompt_tokens, s.num_output_tokens, len(s.arrivals)) for s in done.samples} == {(3, 7, 7)}


async def test_an_engine_may_end_early(origin: Origin) -> None:
    done = await load(origin, num_prompts=1, output_length=100)
    assert done.samples[0].num_output_tokens == 20


async def test_it_names_its_model(origin: Origin) -> None:
    assert (await get_json(origin, "/v1/models"))["data"][0]["id"] == "peer"


@pytest.mark.parametrize(("max_tokens", "num_tokens", "reason"), [(7, 7, "length"), (100, 20, "stop")])
async def test_a_text_is_answered_at_once_if_no_stream_is_asked_for(
    origin: Origin, max_tokens: int, num_tokens: int, reason: str
) -> None:
    answer = await post_json(origin, "/v1/completions", {"prompt": "text", "max_tokens": max_tokens})
    text = "".join(f" {token}" for token in range(5, 5 + num_tokens))
    assert answer["choices"] == [{"index": 0, "text": text, "finish_reason": reason}]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": num_tokens}
