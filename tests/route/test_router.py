"""The router before fakes: who gets what, what is drained and passed on, and what becomes of failures."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from forebay.base.errors import Unavailable
from forebay.base.proof import PROOF
from forebay.requests.updates import Failure
from forebay.route.announcement import Role
from forebay.route.hops import VIA
from forebay.route.selection import BALANCE_ABS_THRESHOLD
from forebay.route.upstream import MEMBER_LOST, Upstream
from tests.deadlines import HANGS_S
from tests.route.conftest import PROVEN, Route, Routed, start_router
from tests.server.fake_engine import FakeEngine

LONG = "a" * 2000


def ask(routed: Routed, prompt: Any = "a", **fields: Any) -> httpx.Response:
    with routed.client() as http:
        return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **fields})


def direct(routed: Routed, prompt: Any = "a", **fields: Any) -> dict[str, Any]:
    """What decode alone says."""
    with routed.decode[0].client() as http:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 1}
        body = {"prompt": prompt, "max_tokens": 3, **where, **fields}
        answer: dict[str, Any] = http.post("/v1/completions", json=body, auth=PROVEN).json()
    return answer


def num_submitted(routed: Routed) -> tuple[list[int], list[int]]:
    at_rest(routed)
    return (
        [len(server.engine.submitted) for server in routed.prefill],
        [len(server.engine.submitted) for server in routed.decode],
    )


def manual() -> FakeEngine:
    return FakeEngine(manual=True)


def test_both_halves_meet_in_a_room_and_decodes_answer_is_the_clients(route: Route) -> None:
    routed = route()
    answer = ask(routed, seed=1).json()
    at_rest(routed)
    assert answer["choices"] == direct(routed, seed=1)["choices"]
    [one], (other, _) = routed.prefill[0].engine.rendezvous, routed.decode[0].engine.rendezvous
    assert one.room == other.room
    assert other.host == "127.0.0.1"
    assert ask(routed).is_success
    at_rest(routed)
    rooms = [each.room for each in routed.prefill[0].engine.rendezvous]
    assert len({*rooms}) == 2


def test_what_is_embedded_is_prefills_alone(route: Route) -> None:
    routed = route()
    with routed.client() as http:
        answer = http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert [entry["index"] for entry in answer.json()["data"]] == [0, 1]
        assert http.post("/v1/embeddings", json={"input": []}).json()["error"]["param"] == "input"
    assert num_submitted(routed) == ([2], [0])


def test_c27_prefill_server_that_breaks_while_it_embeds_is_down(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    routed = route()

    async def breaks(self: Upstream) -> None:
        raise Unavailable("the connection broke", code=MEMBER_LOST)

    monkeypatch.setattr(Upstream, "head", breaks)
    with routed.client() as http:
        answer = http.post("/v1/embeddings", json={"input": ["a"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, MEMBER_LOST)
    prefill = routed.router.members.with_role(Role.PREFILL)[0]
    assert (prefill.up, prefill.in_flight) == (False, 0)
    at_rest(routed)


def test_a_stream_comes_through_as_it_is(route: Route) -> None:
    routed = route()
    streamed = ask(routed, seed=1, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == direct(routed, seed=1)["choices"][0]["text"]
    at_rest(routed)


SAID = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
DIALECTS = [
    ("/v1/messages", SAID, "message_stop", "error"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}, "response.incomplete", "error"),
]


@pytest.mark.parametrize(("path", "body", "last", "_"), DIALECTS)
def test_every_dialect_goes_to_both_halves(route: Route, path: str, body: dict[str, Any], last: str, _: str) -> None:
    routed = route()
    with routed.client() as http:
        events = [line[6:] for line in http.post(path, json={**body, "stream": True}).text.splitlines() if line]
        assert http.post(path, json={**body, "bootstrap_room": 5}).status_code == 400
        assert http.post("/v1/messages/count_tokens", json={**SAID, "max_tokens": "a"}).status_code == 400
        counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": SAID["messages"]}).json()
    at_rest(routed)
    assert json.loads(events[-1])["type"] == last
    [one], [other] = routed.prefill[0].engine.rendezvous, routed.decode[0].engine.rendezvous
    assert one.room == other.room
    assert counted["input_tokens"] > 1


def test_router_generate_reaches_both_servers_and_abort_is_unsupported(route: Route) -> None:
    routed = route()
    asked = {"text": "a" * 600, "sampling_params": {"max_new_tokens": 3}}
    with routed.client() as http:
        for stream in (False, True):
            answer = http.post("/generate", json={**asked, "stream": stream})
            assert ("[DONE]" in answer.text) == stream
            assert '"completion_tokens":3' in answer.text
        wrong = http.post("/generate", json={**asked, "sampling_params": {"top_p": 7}}).json()
        refused = http.post("/abort_request", json={"rid": "a"})
    at_rest(routed)
    assert num_submitted(routed) == ([2], [2])
    assert wrong["error"]["param"] == "sampling_params.top_p"
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_route")


def test_several_choices_have_a_room_each(route: Route) -> None:
    routed = route()
    assert ask(routed, ["a", "b"], n=2).is_success
    at_rest(routed)
    rooms = [each.room for each in routed.prefill[0].engine.rendezvous]
    assert rooms == list(range(rooms[0], rooms[0] + 4))
    assert rooms == [each.room for each in routed.decode[0].engine.rendezvous]


def test_prompts_go_where_their_beginning_is_known_and_others_where_least_is_done(route: Route) -> None:
    routed = route(prefill=2, decode=2)
    for _ in range(3):
        assert ask(routed, LONG).is_success
        at_rest(routed)
    assert num_submitted(routed) == ([3, 0], [2, 1])
    assert ask(routed, "b" * 2000).is_success
    assert num_submitted(routed)[0] == [3, 1]
    routed.router.members.with_role(Role.PREFILL)[0].in_flight += BALANCE_ABS_THRESHOLD
    assert ask(routed, LONG).is_success
    routed.router.members.with_role(Role.PREFILL)[0].in_flight -= BALANCE_ABS_THRESHOLD
    assert num_submitted(routed)[0] == [3, 2]


def test_router_compressed_prompt_goes_where_its_beginning_is_known(route: Route) -> None:
    routed = route(prefill=2)
    content = json.dumps({"prompt": LONG, "max_tokens": 3}).encode()
    kind = {"content-type": "application/json"}
    with routed.client(headers=kind) as http:
        for sent, headers in ((content, {}), (gzip.compress(content), {"content-encoding": "gzip"})):
            assert http.post("/v1/completions", content=sent, headers=headers).is_success
            at_rest(routed)
    assert num_submitted(routed)[0] == [2, 0]


def test_what_a_client_must_not_choose_or_got_wrong_is_said_as_a_server_would(route: Route) -> None:
    routed = route()
    answer = ask(routed, bootstrap_room=5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_room")
    assert num_submitted(routed) == ([0], [0])
    answer = ask(routed, temperature="hot")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    assert answer.headers["x-request-id"]
    with routed.client() as http:
        assert http.get("/nowhere").status_code == 404
        assert http.get("/version").status_code == 404


def slow() -> FakeEngine:
    return FakeEngine(interval_s=0.01)


def at_rest(routed: Routed) -> None:
    """Wait until no request to a server is under way."""
    routed.until(lambda: not any(member.in_flight for member in routed.router.members.all))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_both_halves(route: Route, stream: bool) -> None:
    routed = route(make=slow)
    servers = [*routed.prefill, *routed.decode]
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(routed.url).port), HANGS_S) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        for server in servers:
            server.until(lambda server=server: len(server.engine.submitted) == 1)
    for server in servers:
        server.until(lambda server=server: len(server.engine.aborted) == 1)
    at_rest(routed)
    assert b"requests_refused_total{" not in routed.router.metrics.render(routed.router.members)


def test_prefill_that_refuses_is_heard_at_once_and_decode_waits_for_nothing(route: Route) -> None:
    """Decode would have waited for its room until a time-out."""
    routed = route(make=manual)
    routed.prefill[0].call(lambda: setattr(routed.prefill[0].engine, "_limit", 0))
    answer = ask(routed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"]
    routed.decode[0].until(lambda: len(routed.decode[0].engine.aborted) == 1)
    at_rest(routed)


def test_before_the_first_token_another_server_takes_over(route: Route, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forebay")
    routed = route(prefill=2, decode=2)
    routed.prefill[0].close()
    routed.decode[0].engine.dead = Failure("EngineError", "engine_dead", "killed by signal 9")  # its server lives on
    assert ask(routed).is_success
    at_rest(routed)
    assert [member.up for member in routed.router.members.all] == [False, True, False, True]
    assert any(line.startswith("request_begun_again code=") for line in caplog.messages)


def test_router_failure_after_the_first_token_ends_the_stream_without_a_retry(route: Route) -> None:
    routed = route(decode=2, make=slow)
    routed.prefill[0].engine.script = lambda prompt, params: [100]
    with routed.client() as http:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            events = (line[6:] for line in answer.iter_lines() if line)
            next(events)
            routed.decode[0].call(routed.decode[0].engine.die)
            *_, error, done = events
    assert (json.loads(error)["error"]["code"], done) == ("engine_dead", "[DONE]")
    assert len(routed.decode[1].engine.submitted) == 0
    at_rest(routed)


def test_what_is_missing_is_said_by_role_and_comes_back_by_itself(route: Route) -> None:
    routed = route()
    routed.decode[0].call(lambda: routed.decode[0].engine.die())
    routed.until(lambda: True)
    answer = ask(routed)
    assert answer.status_code == 503
    routed.check()
    answer = ask(routed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_server")
    with routed.client() as http:
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert "decode http" in ready.json()["message"]
        metrics = http.get("/metrics").text
    assert f'forebay:route_server_up{{role="decode",server="{routed.decode[0].url}"}} 0.0' in metrics


def test_a_server_of_another_role_is_not_taken_for_one(route: Route) -> None:
    routed = route()
    swapped = start_router(routed.decode, routed.prefill)
    whys = [member.why for member in swapped.router.members.all]
    swapped.prefill = swapped.decode = []
    swapped.close()
    assert whys[0] == "it is no prefill server: its --disaggregation-mode is decode"
    assert ask(routed).is_success


def test_the_page_finds_all_members(route: Route) -> None:
    routed = route(prefill=2)
    with routed.client() as http:
        state, info = http.get("/debug/state").json(), http.get("/server_info").json()
        assert http.get("/").text.startswith("<!doctype html>")
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert http.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
        assert http.post("/flush_cache").json()["success"]
    assert [member["name"] for member in state["members"]] == ["prefill 1", "prefill 2", "decode"]
    assert {pool["name"].rpartition(" ")[0] for pool in state["pools"]} == {"prefill 1", "prefill 2", "decode"}
    assert [member["up"] for member in info["members"]] == [True] * 3
    assert info["served_model_name"] == "tiny"
    assert [server.engine.flushed for server in (*routed.prefill, *routed.decode)] == [1, 1, 1]


def test_keys_are_the_members_as_they_are_the_routers(route: Route) -> None:
    key = "sk-canary-0123456789"
    routed = route(api_keys=(key,))
    assert ask(routed).status_code == 401
    with routed.client(headers={"authorization": f"Bearer {key}"}) as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


def test_a_connection_that_breaks_in_a_stream_is_told_in_it(route: Route) -> None:
    """Not by silence, which a client could take for the end."""
    routed = route(make=slow)
    routed.prefill[0].engine.script = lambda prompt, params: [100]
    with routed.client() as http:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            events = (line[6:] for line in answer.iter_lines() if line)
            next(events)
            routed.loop.call_soon_threadsafe(routed.router.members.with_role(Role.DECODE)[0].pool.give_up)
            *_, error, done = events
    assert (json.loads(error)["error"]["code"], done) == ("member_lost", "[DONE]")
    at_rest(routed)


@pytest.mark.parametrize(("path", "body", "_", "last"), DIALECTS)
def test_what_breaks_is_told_as_the_dialect_tells_it(
    route: Route, path: str, body: dict[str, Any], _: str, last: str
) -> None:
    routed = route(make=slow)
    routed.prefill[0].engine.script = lambda prompt, params: [100]
    longer = {**body, "stream": True, ("max_tokens" if "max_tokens" in body else "max_output_tokens"): 4000}
    with routed.client() as http, http.stream("POST", path, json=longer) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        routed.loop.call_soon_threadsafe(routed.router.members.with_role(Role.DECODE)[0].pool.give_up)
        *_more, name, data = lines
    assert (name, json.loads(data[6:])["type"]) == (f"event: {last}", "error")
    at_rest(routed)


def test_what_a_client_writes_into_a_path_stays_in_it(route: Route) -> None:
    """Decoded it would end where there is a space, and the rest would be more of a request."""
    routed = route()
    with routed.client() as http:
        answer = http.get("/v1/models/x%20HTTP/1.1%3Fy")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "x HTTP/1.1?y" in answer.json()["error"]["message"]


def test_router_members_get_the_bytes_and_headers_of_the_client(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """C33: nothing of a client's reaches a member changed, and nothing but what members need reaches them."""
    routed, sent = route(), dict[str, tuple[dict[str, str], bytes | None]]()
    send = Upstream.send

    def watched(self: Upstream, method: str, path: str, headers: Any, body: bytes | None = None) -> None:
        sent[f"{self.origin}"] = dict(headers), body
        send(self, method, path, headers, body)

    monkeypatch.setattr(Upstream, "send", watched)
    content = b' {"prompt": "a",  "max_tokens": 3e0, "temperature": 1.50, "user": "\\u00e9", "seed": 1}\n'
    said = {"content-type": "application/json; charset=utf-8", "x-request-id": "mine", "cookie": "a=b", "x-other": "c"}
    with routed.client(headers=said) as http:
        http.post("/v1/completions", content=content)
    at_rest(routed)
    (prefill, one), (decode, other) = (sent[server.url] for server in (routed.prefill[0], routed.decode[0]))
    assert one == other == content
    room = {"x-forebay-bootstrap-room": decode["x-forebay-bootstrap-room"]}
    kept = {"content-type": said["content-type"], "x-request-id": "mine", VIA: routed.router.id, **room}
    assert prefill.pop(PROOF) != decode.pop(PROOF), "each is for one message"
    assert prefill == kept
    assert decode == {**kept, "x-forebay-bootstrap-host": "127.0.0.1"}


def test_router_with_another_cluster_key_finds_no_server(route: Route) -> None:
    """C33: it says so, and no client's request is refused in its place."""
    routed = route()
    stranger = start_router(routed.prefill, routed.decode, cluster_key=b"another-cluster-key")
    answer = ask(stranger)
    whys = {member.why for member in stranger.router.members.all}
    stranger.prefill = stranger.decode = []
    stranger.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_prefill_server")
    assert {why.partition(" (")[0] for why in whys} == {"it refuses this router"}
    assert {why.rpartition(": ")[2] for why in whys} == {"give both the same --cluster-key-file"}


@pytest.mark.parametrize("stream", [False, True])
def test_router_answer_has_the_header_of_the_servers_cache(route: Route, stream: bool) -> None:
    """C20."""
    routed = route(servers=1)
    with routed.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 2, "stream": stream})
    num_tokens = len(routed.servers[0].engine.submitted[-1].prompt)
    assert answer.headers["x-forebay-cache"] == f"1/{num_tokens} not_cached_yet"


def test_router_explains_a_request_of_any_of_its_servers_and_no_other(route: Route) -> None:
    routed = route(servers=2)
    with routed.client() as http:
        ids = [http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).json()["id"] for _ in range(4)]
        found = [http.get(f"/debug/explain/{answer_id}").json() for answer_id in ids]
        unknown = http.get("/debug/explain/cmpl-none")
    assert [f"cmpl-{one['id']}" for one in found] == ids
    assert {one["output_tokens"] for one in found} == {2}
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
