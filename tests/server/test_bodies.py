"""Large bodies: refused by their counts, parsed beside the event loop, and never many at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive

from forebay.base.errors import InvalidRequest, Overloaded, RequestError
from forebay.http import bodies
from forebay.http.bodies import INLINE_BYTES, ROOM_BYTES, Bodies, _check_size, parse_json_object
from forebay.http.lifecycle import Watch
from forebay.http.preparation import Client, Preparation
from forebay.http.workers import Workers
from forebay.server.api.openai.completions import CompletionDialect
from forebay.server.protocol import strict
from forebay.server.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from forebay.server.protocol.strict import Strict, body_types
from tests.deadlines import HANGS_S
from tests.server.conftest import CONFIG, Running
from tests.server.process_status import MIB
from tests.server.test_connections import ask

SCOPE = {"path": "/v1/completions", "headers": [(b"content-type", b"application/json")]}
FEW = 40  # as many as the fields of a type
MESSAGE = b'{"role":"nobody","content":5}'
PART = b'{"type":"text","text":5}'


def listed(start: bytes, entry: bytes, count: int, end: bytes) -> bytes:
    return start + (entry + b",") * (count - 1) + entry + end


@functools.cache
def entries(count: int) -> bytes:
    return b",".join(b'"k%d":1' % i for i in range(count))


def keys(start: bytes, count: int, end: bytes) -> bytes:
    return start + entries(count) + end


BOMBS: dict[str, tuple[type[Strict], bytes]] = {
    "unknown keys": (CompletionRequest, keys(b"{", 330_000, b"}")),
    "negative ids": (CompletionRequest, listed(b'{"prompt":[', b"-1", 1_300_000, b"]}")),
    "ids": (CompletionRequest, listed(b'{"prompt":[', b"1", 2_090_000, b"]}")),
    "ids in a list of prompts": (CompletionRequest, listed(b'{"prompt":[[', b"1", 2_090_000, b"]]}")),
    "empty texts": (CompletionRequest, listed(b'{"prompt":[', b'""', 1_300_000, b"]}")),
    "stop strings": (CompletionRequest, listed(b'{"prompt":"x","stop":[', b'""', 1_300_000, b"]}")),
    "biases": (CompletionRequest, keys(b'{"prompt":"x","logit_bias":{', 330_000, b"}}")),
    "metadata": (ChatRequest, keys(b'{"messages":[],"metadata":{', 330_000, b"}}")),
    "tokens": (DetokenizeRequest, listed(b'{"tokens":[', b"-1", 1_300_000, b"]}")),
    "numbers": (DetokenizeRequest, listed(b'{"tokens":[', b"1e9", 1_000_000, b"]}")),
}
# What is within the counts, and wrong in every place.
WRONG_EVERYWHERE: dict[str, tuple[type[Strict], bytes]] = {
    "unknown keys": (CompletionRequest, keys(b"{", 90_000, b"}")),
    "unknown keys of a message": (ChatRequest, keys(b'{"messages":[{', 90_000, b"}]}")),
    "negative ids": (CompletionRequest, listed(b'{"prompt":[', b"-1", 90_000, b"]}")),
    "prompts of negative ids": (CompletionRequest, listed(b'{"prompt":[', b"[-1,-1]", 16, b"]}")),
    "messages": (ChatRequest, listed(b'{"messages":[', MESSAGE, 4096, b"]}")),
    "parts": (ChatRequest, listed(b'{"messages":[{"role":"user","content":[', PART, 256, b"]}]}")),
    "stop strings": (CompletionRequest, listed(b'{"prompt":"x","stop":[', b"5", 90_000, b"]}")),
    "stop ids": (CompletionRequest, listed(b'{"prompt":"x","stop_token_ids":[', b"-1", 90_000, b"]}")),
    "biases": (CompletionRequest, keys(b'{"prompt":"x","logit_bias":{', 90_000, b"}}")),
    "tokens": (DetokenizeRequest, listed(b'{"tokens":[', b"-1", 90_000, b"]}")),
}


@pytest.mark.parametrize(("kind", "body"), BOMBS.values(), ids=BOMBS)
def test_too_many_values_are_refused_before_one_is_made(kind: type[Strict], body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="at most"):
            parse_json_object(body, 8192 * CONFIG.max_prompts)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB + 2 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "body"), WRONG_EVERYWHERE.values(), ids=WRONG_EVERYWHERE)
def test_of_many_mistakes_few_are_collected(kind: type[Strict], body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(
        strict,
        "validation_error",
        lambda details, *rest: counts.append(len(details)) or InvalidRequest("refused"),  # type: ignore[func-returns-value]
    )
    with pytest.raises(InvalidRequest):
        kind.parse(parse_json_object(body))
    assert 1 <= counts[0] <= FEW


def test_every_list_that_is_looked_at_entry_by_entry_stops_at_the_first_mistake() -> None:
    """Of any type, so that a new field cannot forget it."""
    for kind in body_types():
        for schema in find(kind.__pydantic_core_schema__, ("list", "dict")):
            assert schema.get("fail_fast") is True, (kind, schema)


def find(schema: Any, wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    if isinstance(schema, list | tuple):
        return [found for item in schema for found in find(item, wanted)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") in wanted and {"items_schema", "keys_schema"} & set(schema) else []
    return own + [found for item in schema.values() for found in find(item, wanted)]


json_values = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='"\\,[]{}:a\n', max_size=6),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(alphabet='"\\,[a', max_size=3), inside),
    max_leaves=40,
)


def num_commas(value: Any) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inside) - 1) + sum(map(num_commas, inside))


@given(json_values)
def test_commas_and_brackets_in_texts_are_no_values(value: Any) -> None:
    body = json.dumps({"a": value, "b": 1}).encode()
    count = 1 + num_commas(value)
    _check_size(body, count + 1)
    with pytest.raises(InvalidRequest, match=f"{count + 1} values or more; at most {count} are read"):
        _check_size(body, count)


def received(*blocks: bytes) -> Receive:
    left = list(blocks)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        block = left.pop(0)
        return {"type": "http.request", "body": block, "more_body": bool(left)}

    return receive


def prompt_of(num_bytes: int) -> bytes:
    return b'{"prompt":"%b"}' % (b"a" * num_bytes)


def test_a_large_body_is_not_parsed_by_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[threading.Thread] = []
    turned = threading.Event()

    def parse(content: bytes, max_ids: int) -> dict[str, Any]:
        parsers.append(threading.current_thread())
        # The loop goes on meanwhile: it is what lets this end.
        assert len(content) <= INLINE_BYTES or turned.wait(HANGS_S)
        return parse_json_object(content, max_ids)

    monkeypatch.setattr(bodies, "parse_json_object", parse)

    async def main() -> None:
        reader = Bodies(1 << 22, Workers(Preparation({}).lane("test", 1)), {})
        small = await reader.read(CompletionRequest, SCOPE, Client(Watch(received(prompt_of(100)))), 0)
        asyncio.get_running_loop().call_later(0.01, turned.set)
        large = await reader.read(CompletionRequest, SCOPE, Client(Watch(received(prompt_of(1 << 20)))), 0)
        assert (len(small.prompt), len(large.prompt)) == (100, 1 << 20)

    asyncio.run(main())
    assert parsers[0] is threading.current_thread()
    assert parsers[1] is not threading.current_thread()


def test_large_bodies_that_dawdle_have_limited_room_and_small_ones_pass() -> None:
    async def main() -> None:
        reader = Bodies(ROOM_BYTES // 4, Workers(Preparation({}).lane("test", 1)), {})
        never = asyncio.Event()

        def dawdling(block: bytes) -> Receive:
            async def receive() -> dict[str, Any]:
                nonlocal block
                if not block:
                    await never.wait()
                sent, block = block, b""
                return {"type": "http.request", "body": sent, "more_body": True}

            return receive

        quarter = b" " * (ROOM_BYTES // 4 - 1)
        waiting = [
            asyncio.create_task(reader.read(CompletionRequest, SCOPE, Client(Watch(dawdling(quarter))), 0))
            for _ in range(4)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="large bodies"):
            await reader.read(CompletionRequest, SCOPE, Client(Watch(received(prompt_of(INLINE_BYTES)))), 0)
        await reader.read(CompletionRequest, SCOPE, Client(Watch(received(prompt_of(100)))), 0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await reader.read(CompletionRequest, SCOPE, Client(Watch(received(prompt_of(INLINE_BYTES)))), 0)

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "body"), [BOMBS["ids"], WRONG_EVERYWHERE["negative ids"]], ids=["ids", "negative"])
def test_the_server_answers_a_bomb_and_goes_on(launch: Callable[..., Running], kind: type[Strict], body: bytes) -> None:
    server = launch()
    with server.connect() as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.settimeout(HANGS_S)
        assert ask(sock, head + b"content-length: %d\r\n\r\n" % len(body) + body).startswith(b"HTTP/1.1 400")
        assert ask(sock, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("logprobs", "beside"), [(None, False), (1, False), (20, True)])
def test_an_answer_with_many_scores_is_not_written_by_the_event_loop(
    launch: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, logprobs: int | None, beside: bool
) -> None:
    server = launch()
    writers: list[threading.Thread] = []
    real = CompletionDialect.whole

    def whole(self: CompletionDialect, *args: Any) -> bytes:
        writers.append(threading.current_thread())
        return real(self, *args)

    monkeypatch.setattr(CompletionDialect, "whole", whole)
    ask = {"prompt": [5] * 100, "max_tokens": 2, "echo": True, "logprobs": logprobs}
    with server.client() as http:
        answer = http.post("/v1/completions", json=ask).json()["choices"][0]
    assert (writers[0] is not server.thread) == beside
    if logprobs is not None:
        assert [len(answer["logprobs"][name]) for name in ("tokens", "token_logprobs", "text_offset")] == [102] * 3


def test_errors_are_typed_wherever_a_body_is_parsed() -> None:
    async def main() -> None:
        reader = Bodies(1 << 22, Workers(Preparation({}).lane("test", 1)), {})
        for padding in (b"", b" " * INLINE_BYTES):
            with pytest.raises(RequestError, match="not a JSON object"):
                await reader.read(CompletionRequest, SCOPE, Client(Watch(received(b"[" + padding))), 0)

    asyncio.run(main())


def test_c32_large_bodies_of_one_tenant_leave_another_its_share_of_the_room() -> None:
    async def main() -> None:
        reader = Bodies(ROOM_BYTES // 4, Workers(Preparation({}).lane("test", 1)), {"a": 1, "b": 1})
        quarter, held = b" " * (ROOM_BYTES // 4 - 1), asyncio.Event()

        async def hold() -> None:
            async with reader.content(SCOPE, Client(Watch(received(quarter)), "a")):
                await held.wait()

        holding = [asyncio.create_task(hold()) for _ in range(4)]
        await asyncio.sleep(0)
        for tenant, refused in (("a", True), ("b", False)):
            client = Client(Watch(received(prompt_of(INLINE_BYTES))), tenant)
            with pytest.raises(Overloaded) if refused else contextlib.nullcontext():
                await reader.read(CompletionRequest, SCOPE, client, 0)
        held.set()
        await asyncio.gather(*holding)

    asyncio.run(main())
