"""Streams that say nothing for a while: events without effect keep the connection, and change no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from forebay.server.api.core import dialect
from forebay.server.api.core.dialect import EventWriter
from tests.server.conftest import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
COMMENT, PING = [": keep-alive", ""], ["event: ping", 'data: {"type":"ping"}', ""]
STREAMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 3, "seed": 1}, COMMENT),
    "/v1/chat/completions": ({**CHAT, "seed": 1}, COMMENT),
    "/v1/messages": ({**CHAT, "model": "tiny"}, PING),
    "/v1/responses": ({"input": "x", "max_output_tokens": 3}, COMMENT),
    "/completion": ({"prompt": "x", "n_predict": 3, "seed": 1}, COMMENT),
    "/generate": ({"text": "x", "sampling_params": {"max_new_tokens": 3}}, COMMENT),
}
SILENT = 3  # events without effect before the first token
streams = pytest.mark.parametrize(("path", "body", "beat"), [(path, *each) for path, each in STREAMS.items()])


@pytest.fixture
def server(launch: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> Running:
    """Its engine does not step, and streams are silent for no more than a hundredth of a second."""
    monkeypatch.setattr(dialect, "KEEP_ALIVE_S", 0.01)
    server = launch()
    server.call(setattr, server.engine, "hold", True)
    return server


def after_silence(monkeypatch: pytest.MonkeyPatch, server: Running, then: Callable[[], Any]) -> None:
    """Call `then` in the server's loop once a stream has written `SILENT` events without effect."""
    real, count = EventWriter._keep_alive, iter(range(1, 1 << 30))

    def keep_alive(self: EventWriter) -> None:
        real(self)
        if next(count) == SILENT:
            then()

    monkeypatch.setattr(EventWriter, "_keep_alive", keep_alive)


def go_on(server: Running) -> Callable[[], None]:
    return lambda: setattr(server.engine, "hold", False)


def lines_of(server: Running, path: str, body: dict[str, Any]) -> list[str]:
    with server.client() as http:
        answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    return answer.text.splitlines()


def events_of(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return the parts of events with an effect that do not depend on ids, seeds and times."""
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(each) for each in told if each.startswith("{")]
    return [(event.get("type"), sorted(event)) for event in events if event.get("type") != "ping"]


@streams
def test_silent_stream_gets_events_without_effect_and_then_its_answer(
    server: Running, path: str, body: dict[str, Any], beat: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after_silence(monkeypatch, server, go_on(server))
    found = lines_of(server, path, body)
    assert found[: SILENT * len(beat)] == beat * SILENT
    told = events_of(found[SILENT * len(beat) :])
    assert told == events_of(lines_of(server, path, body))
    assert len(told) >= 3


@streams
def test_failure_after_the_silence_is_an_event_of_the_dialect(
    server: Running, path: str, body: dict[str, Any], beat: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after_silence(monkeypatch, server, lambda: server.engine.die())
    ending = "".join(lines_of(server, path, body)[SILENT * len(beat) :])
    assert "the engine died while it worked on this request" in ending
    assert "error" in ending


def test_silent_stream_is_no_event_for_the_clients_of_openai_and_anthropic(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_silence(monkeypatch, server, go_on(server))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    assert all(chunk.choices for chunk in client.chat.completions.create(model="tiny", stream=True, **CHAT))
    server.call(setattr, server.engine, "hold", True)
    after_silence(monkeypatch, server, go_on(server))
    other = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    with other.messages.stream(model="tiny", **CHAT) as stream:
        assert next(iter(stream)).type == "message_start"
        assert stream.get_final_message().usage.output_tokens == 3
    client.close()
    other.close()


def test_ollama_stream_has_no_line_before_its_first_token(server: Running) -> None:
    body = {"model": "tiny", "messages": CHAT["messages"], "options": {"num_predict": 3}}
    server.loop.call_soon_threadsafe(lambda: server.loop.call_later(0.1, go_on(server)))
    assert all(json.loads(line)["model"] == "tiny" for line in lines_of(server, "/api/chat", body))


def test_stream_that_pauses_behind_a_token_gets_events_without_effect(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_silence(monkeypatch, server, go_on(server))
    server.call(setattr, server.engine, "hold", False)
    step = server.engine.step

    def step_once() -> None:
        step()
        server.engine.hold = True

    server.call(setattr, server.engine, "step", step_once)
    body, beat = STREAMS["/v1/completions"]
    found = lines_of(server, "/v1/completions", {**body, "max_tokens": 2})
    assert found[0].startswith("data: {")
    assert found.count(beat[0]) >= SILENT - 1
    assert found[-2:] == ["data: [DONE]", ""] or found[-1] == "data: [DONE]"


def test_request_that_is_refused_before_the_silence_has_its_own_status(server: Running) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "x" * 9000, "max_tokens": 3, "stream": True})
    assert answer.status_code == 400


async def test_stream_whose_first_update_writes_nothing_begins_without_an_event() -> None:
    written: list[bytes] = []

    async def at_once() -> None:
        return

    connection: Any = SimpleNamespace(write_chunk=lambda data: written.append(data) or True)
    generation: Any = SimpleNamespace(begun=at_once, ended=at_once)
    of_dialect: Any = SimpleNamespace(keep_alive=b": keep-alive\n\n", closing=lambda generation: b"end")
    writer = EventWriter(connection, of_dialect, generation)
    await writer.begun()
    assert await writer.finish() == b"end"
    assert written == []


def test_stream_that_a_silence_began_has_no_header_of_its_cache(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20: when its status was sent, nothing was known of the cache."""
    after_silence(monkeypatch, server, go_on(server))
    with server.client() as http:
        answer = http.post("/v1/completions", json={**STREAMS["/v1/completions"][0], "stream": True})
    assert (answer.status_code, "x-forebay-cache" in answer.headers) == (200, False)
