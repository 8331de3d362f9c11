"""Scorecard I-1 and health: what the server says while it starts, works, hangs, drains and dies."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from forebay.base.errors import EngineError, Unavailable
from forebay.engine.frames import Beat, State
from forebay.http import door
from forebay.memory.miss_reason import MissReason
from forebay.server.admin.metrics import Metrics
from tests.deadlines import HANGS_S, NEVER_S, wait_until
from tests.server.conftest import MODEL, Running
from tests.server.crowds import read_all, request
from tests.server.fake_engine import FakeEngine

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500, "stream": True}


class LoadingEngine(FakeEngine):
    @property
    def info(self):  # type: ignore[override]
        raise Unavailable("the model is still loading", code="starting")

    @info.setter
    def info(self, value) -> None:
        pass


def test_a_loading_model_is_alive_but_not_ready(launch) -> None:
    with launch(LoadingEngine).client() as http:
        assert http.get("/health").json() == {"status": "ok", "reason": "starting"}
        assert http.get("/ready").status_code == 503
        answer = http.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "starting"


def test_health_is_progress(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ok", "reason": "ok"}
        server.engine.last_tick_age_s = 5.1
        assert http.get("/health").status_code == 503
        assert http.get("/health").json()["reason"] == "engine_stalled"
        assert http.get("/ready").json()["reason"] == "engine_stalled"
        server.engine.last_tick_age_s = 0.0
        assert http.get("/ready").status_code == 200


def test_health_tells_a_step_that_hangs_from_one_that_is_long(launch) -> None:
    """The process runs, a thread of its own says so: what counts is how long such a step may take."""
    server = launch(lambda: FakeEngine(manual=True))
    with server.client() as http:
        server.engine.last_beat = Beat(turn_age_s=29.0, step_age_s=29.0, step_limit_s=30.0)
        assert http.get("/health").status_code == 200
        server.engine.last_beat = Beat(turn_age_s=31.0, step_age_s=31.0, step_limit_s=30.0)
        assert http.get("/health").status_code == 503
        assert http.get("/ready").json()["reason"] == "step_stalled"


@pytest.mark.long
def test_head_says_what_get_would_without_its_body(launch) -> None:
    """Load balancers and monitors ask so."""
    with launch().client() as http:
        for path in ("/health", "/v1/models", "/", "/nowhere"):
            head, get = http.head(path), http.get(path)
            assert head.status_code == get.status_code
            assert head.content == b""
            assert head.headers["content-length"] == str(len(get.content))
        assert http.head("/v1/completions").status_code == 405


def test_drain_lets_running_streams_finish_and_refuses_new_ones(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True), drain_timeout_s=NEVER_S)
    with server.connect() as old, server.client() as other:
        old.sendall(request(stream=True, max_tokens=2))
        server.until(lambda: bool(server.engine.running))
        server.call(server.engine.step)
        server.loop.call_soon_threadsafe(server.stop.set)
        wait_until(lambda: other.get("/ready").status_code == 503)
        refused = other.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        server.call(server.engine.step)
        answer = read_all(old)
    assert b'"finish_reason":"length"' in answer
    assert b"data: [DONE]" in answer
    server.thread.join(HANGS_S)
    assert not server.thread.is_alive()
    assert server.failures == []


def test_what_does_not_finish_in_the_grace_gets_a_typed_error(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True), drain_timeout_s=0.2)
    with server.connect() as stuck:
        stuck.sendall(request(stream=True))
        server.until(lambda: bool(server.engine.running))
        server.call(server.engine.step)
        server.loop.call_soon_threadsafe(server.stop.set)
        assert b'"code":"shutting_down"' in read_all(stuck)
    server.thread.join(HANGS_S)
    assert not server.thread.is_alive()
    assert server.failures == []


def test_a_dead_engine_ends_the_server_with_its_cause(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    server.call(server.engine.die)
    server.thread.join(HANGS_S)
    assert not server.thread.is_alive()
    assert isinstance(server.failures[0], EngineError)
    assert "killed by signal 9" in str(server.failures[0])


def test_metrics_label_every_pool_by_holder(shared: Running) -> None:
    with shared.client() as http:
        http.post("/v1/chat/completions", json={**ASK, "max_tokens": 3, "stream": False})
        text = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    slots = {(s.labels["pool"], s.labels["holder"]): s.value for s in families["forebay:pool_slots"].samples}
    assert {pool for pool, _ in slots} == {"kv", "rows"}
    assert {holder for _, holder in slots} == {"free", "running", "cached", "quarantined"}
    assert sum(value for (pool, _), value in slots.items() if pool == "kv") == 4096
    assert families["forebay:generation_tokens"].samples[0].value >= 3
    assert {"forebay:num_running_reqs", "forebay:token_usage", "forebay:time_to_first_token_seconds"} <= set(families)


def test_a_miss_is_counted_once_by_reason_and_a_hit_is_none() -> None:
    counters = {"misses.none": 5.0, "misses.evicted": 2.0, "engine.steps": 7.0, "steps": 7.0, "finished.stop": 1.0}
    state = State(
        step=7,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        pools=[],
        last_step_age_s=0.0,
        oldest_wait_s=0.0,
        counters=counters,
    )
    text = Metrics("tiny").render(state, None)[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    misses = {sample.labels["reason"]: sample.value for sample in families["forebay:cache_miss"].samples}
    assert misses == {reason.value: 2.0 * (reason == "evicted") for reason in MissReason if reason != "none"}
    assert [name for name in families if "miss" in name] == ["forebay:cache_miss"]
    assert families["forebay:engine_steps"].samples[0].value == 7.0
    assert all(family.documentation for family in families.values())
    assert all(re.fullmatch("forebay:[a-z0-9_]+", name) for name in families)


def test_server_info_end_tokens_each_has_its_reason(launch) -> None:
    with launch(model=replace(MODEL, end_tokens={1: "the chat template writes it"})).client() as http:
        assert http.get("/server_info").json()["end_tokens"] == {
            "<|im_start|>": "the chat template writes it",
            "<|im_end|>": "the configuration's eos_token_id",
        }


def test_server_info_says_who_set_what_and_keeps_the_keys(launch) -> None:
    server = launch(api_keys=("canary-key",))
    with server.client(headers={"authorization": "Bearer canary-key"}) as http:
        answer = http.get("/server_info")
        metrics = http.get("/metrics").text
    info = answer.json()
    assert info["settings"][0] == {"name": "page_size", "value": "16", "source": "default", "reason": "the default"}
    assert info["engine"]["report"][0]["item"] == "kv"
    assert info["server"]["max_body_bytes"] == 4 << 20
    assert "canary-key" not in answer.text + metrics


def test_debug_state_is_the_engines_state(shared: Running) -> None:
    with shared.client() as http:
        state = http.get("/debug/state").json()
    assert [pool["name"] for pool in state["pools"]] == ["kv", "rows"]
    assert state["map"] == [0, 1, 2]
    assert state["server"] == {"num_inside": 0, "draining": False}


def test_tokenize_and_detokenize_are_inverse(shared: Running) -> None:
    with shared.client() as http:
        ids = http.post("/tokenize", json={"prompt": "hello <|im_end|> é"}).json()
        assert ids["count"] == len(ids["tokens"])
        text = http.post("/detokenize", json={"tokens": ids["tokens"]}).json()
    assert text == {"prompt": "hello <|im_end|> é", "content": "hello <|im_end|> é"}


def test_texts_are_taken_by_a_server_whose_engine_sleeps(shared: Running) -> None:
    asked = [{"prompt": "hello"}, {"prompt": "a <|im_end|> b"}, {"messages": [{"role": "user", "content": "hi"}]}]
    with shared.client() as http:
        right = [http.post("/tokenize", json=body).json() for body in asked]
        for body, tokens in zip(asked, right, strict=True):
            shared.call(shared.engine.on_sleep)
            assert shared.tokenizer._backend._whole is None
            assert http.post("/tokenize", json=body).json() == tokens
            assert shared.tokenizer._backend._whole is not None


def test_i4_closing_socket_serves_connected_clients_and_no_new_ones() -> None:
    """Between the last look into the queue and the close nobody can get into it, who would be reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        address = listener.getsockname()
        early = socket.create_connection(address, timeout=HANGS_S)
        if not door._take_no_first_segments(listener):
            pytest.skip("this kernel takes no filters of sockets")
        late = pool.submit(socket.create_connection, address, HANGS_S)
        taken, _ = listener.accept()
        early.sendall(b"hello")
        assert taken.recv(8) == b"hello"
        listener.setblocking(False)
        assert door._next_in(listener) is None
        listener.close()
        with pytest.raises(ConnectionRefusedError):  # when it asks again, a second later
            late.result()
        early.close()
        taken.close()


async def test_i4_socket_that_is_inherited_still_takes_connections_for_the_next_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = uvicorn.Server(uvicorn.Config(app="none"))
        server.servers = []
        with listener.dup() as own:
            await door.close_the_door(server, own, 0.0, stays_open=True)
        with socket.create_connection(listener.getsockname(), timeout=HANGS_S):
            taken = door._next_in(listener)
            assert taken is not None
            taken.close()


def test_i4_connected_clients_are_answered_before_the_socket_closes(launch) -> None:
    """A connection that is refused, or a 503, says that the request can go to another server; a reset does not."""
    body = b'{"prompt": "hello", "max_tokens": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
    server: Running = launch()
    answers: list[bytes] = []

    def knock() -> None:
        while True:
            try:
                sock = server.connect()
            except (ConnectionRefusedError, ConnectionResetError):
                return  # it has not connected
            with sock:
                try:
                    sock.sendall(request)
                    answers.append(sock.recv(1 << 16)[:12] or b"nothing")
                except ConnectionError:
                    answers.append(b"reset")

    knockers = [threading.Thread(target=knock) for _ in range(4)]
    for thread in knockers:
        thread.start()
    server.until(lambda: len(answers) > 100)
    server.close()
    for thread in knockers:
        thread.join()
    assert set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
