"""The router before servers of both roles: announcements over HTTP, retries, administration, and a standby router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from forebay.base.proof import PROOF
from forebay.engine.frames import LoadedAdapter
from forebay.route.announce import Announcer
from forebay.route.announcement import Role, State
from forebay.route.standby import Standby
from forebay.route.upstream import Pool
from tests.deadlines import HANGS_S
from tests.route.conftest import CLUSTER_KEY, PROVEN, Route, Routed, start_router
from tests.route.records import announcement
from tests.server.conftest import start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

LONG = "a" * 2000


def ask(routed: Routed, prompt: Any = "a", key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with routed.client(headers=headers) as http:
        return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **fields})


def where(answer: httpx.Response) -> tuple[str, str]:
    return answer.headers["x-forebay-server"], answer.headers["x-forebay-route"]


def test_members_route_servers_of_both_roles_answer_and_are_named_with_the_reason(route: Route) -> None:
    routed = route(servers=2)
    first, second = (server.url for server in routed.servers)
    assert where(ask(routed, LONG)) == (first, "load")
    assert where(ask(routed, LONG, stream=True)) == (first, "prefix")
    assert where(ask(routed, "b" * 2000)) == (second, "load")
    refused = ask(routed, LONG, temperature="hot")
    assert (refused.status_code, where(refused)) == (400, (first, "prefix"))
    with routed.client() as http:
        assert http.get("/v1/models").headers["x-forebay-server"] in (first, second)
        assert http.post("/v1/embeddings", json={"input": "a"}).headers["x-forebay-route"] == "load"
        state = http.get("/debug/state").json()
        metrics = http.get("/metrics").text
    assert [member["name"] for member in state["members"]] == ["server 1", "server 2"]
    assert 'forebay:route_selections_total{reason="prefix"} 2.0' in metrics


def test_members_route_server_that_dies_before_the_first_byte_is_replaced_by_another(route: Route) -> None:
    routed = route(servers=2)
    first, second = routed.servers
    ask(routed, LONG)
    first.call(first.engine.die)
    assert where(answer := ask(routed, LONG)) == (second.url, "retry")
    assert answer.is_success
    second.close()
    answer = ask(routed, LONG)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")
    with routed.client() as http:
        said = http.post("/v1/messages", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    assert (said.status_code, said.json()["type"]) == (503, "error")


def test_members_route_request_without_a_server_waits_for_one_that_was_there(route: Route) -> None:
    routed = route(servers=1, hold_s=HANGS_S)
    [member] = routed.router.members.all

    def leave() -> None:
        routed.router.members.health._hold_s = 0.0

    for back, status in ((routed.check, 200), (leave, 503)):
        routed.loop.call_soon_threadsafe(member.down, "asleep")
        routed.until(lambda: not member.up)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, routed, LONG)
            routed.until(lambda: bool(routed.router.members.health._passed._waiters))
            assert not answer.done()
            back()
            assert answer.result(HANGS_S).status_code == status


def test_members_route_failure_after_the_first_byte_is_not_tried_again(route: Route) -> None:
    routed = route(servers=2, make=lambda: FakeEngine(interval_s=0.01))
    for server in routed.servers:
        server.engine.script = lambda prompt, params: [100]
    with routed.client() as http:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            events = (line[6:] for line in answer.iter_lines() if line)
            next(events)
            routed.loop.call_soon_threadsafe(routed.router.members.all[0].pool.give_up)
            *_, error, done = events
    assert (json.loads(error)["error"]["code"], done) == ("member_lost", "[DONE]")
    assert [len(server.engine.submitted) for server in routed.servers] == [1, 0]


def test_members_route_announced_server_gets_requests_until_it_drains(route: Route) -> None:
    routed = route(servers=1)
    other = start(tiny_tokenizer(), FakeEngine, cluster_key=CLUSTER_KEY)
    routed.servers.append(other)
    announcer = Announcer([routed.url], other.url, Role.BOTH, CLUSTER_KEY, weight_version="v1")
    announcer.start()
    assert announcer.announce(State.READY, wait_s=HANGS_S) == []
    routed.until(lambda: all(member.up for member in routed.router.members.all))  # with no check but at once
    assert {where(ask(routed, letter * 2000))[0] for letter in "abc"} == {server.url for server in routed.servers}
    assert announcer.announce(State.DRAINING, wait_s=HANGS_S) == []
    assert {where(ask(routed, letter * 2000))[0] for letter in "abc"} == {routed.servers[0].url}
    with routed.client(auth=PROVEN) as http:
        listed = {member["url"]: member for member in http.get("/members").json()["members"]}
    told = listed[other.url]
    assert (told["state"], told["why"], told["weight_version"]) == ("draining", "it is draining", "v1/0")
    assert told["instance"] == announcer.instance
    assert 0 < told["lease_s"] <= 10
    assert listed[routed.servers[0].url]["state"] is None
    assert announcer.close(HANGS_S) == []
    assert [member.url for member in routed.router.members.all] == [routed.servers[0].url]


def post(
    routed: Routed, said: Any = None, *, headers: dict[str, str] | None = None, auth: httpx.Auth | None = PROVEN
) -> httpx.Response:
    content = msgspec.json.encode(announcement(1) if said is None else said)
    with routed.client(headers={"content-type": "application/json", **(headers or {})}, auth=auth) as http:
        return http.post("/members", content=content)


@pytest.mark.parametrize("headers", [{}, {PROOF: "0" * 64}, {"authorization": "Bearer sk-user-0123456789"}])
def test_members_route_needs_the_cluster_key_and_no_api_key(route: Route, headers: dict[str, str]) -> None:
    keys = {"api_keys": ("sk-user-0123456789",), "admin_api_keys": ("sk-admin-0123456789",)}
    routed = route(servers=1, **keys)
    assert post(routed, headers=headers, auth=None).json()["error"]["code"] == "cluster_key_required"
    with routed.client(headers=headers) as http:
        assert http.get("/members").status_code == 403
        assert http.post("/members/prefixes", json={}).status_code == 403
    assert len(routed.router.members.all) == 1
    assert post(routed).json() == {"lease_s": 10.0, "members": 2}
    assert ask(routed).status_code == 401
    assert ask(routed, key="sk-user-0123456789").is_success


def test_members_route_announced_server_is_checked_without_a_users_key(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that announces itself has the cluster key, and gets no client's before a client's request."""
    keys: dict[str, Any] = {"api_keys": ("sk-user-0123456789",)}
    routed = route(servers=1, **keys)
    other = start(tiny_tokenizer(), FakeEngine, cluster_key=CLUSTER_KEY, **keys)
    routed.servers.append(other)
    sent: list[tuple[str, str, bool]] = []
    asked = Pool.ask

    async def ask_pool(self: Pool, method: str, path: str, headers: Mapping[str, str], *rest: Any) -> Any:
        sent.append((str(self.origin), path, "authorization" in headers))
        return await asked(self, method, path, headers, *rest)

    monkeypatch.setattr(Pool, "ask", ask_pool)
    announcer = Announcer([routed.url], other.url, Role.BOTH, CLUSTER_KEY)
    announcer.start()
    assert announcer.announce(State.READY, wait_s=HANGS_S) == []
    routed.until(lambda: all(member.up for member in routed.router.members.all))
    routed.check()
    assert ask(routed, key="sk-user-0123456789").is_success
    announcer.close(HANGS_S)
    checks = {(url, path, with_key) for url, path, with_key in sent if path in ("/ready", "/server_info")}
    assert (other.url, "/ready", False) in checks
    assert (other.url, "/server_info", False) in checks
    assert {with_key for url, _, with_key in checks if url == other.url} == {False}
    assert {with_key for url, _, with_key in checks if url != other.url} == {True}, "of the command line"


def test_members_route_announced_server_without_the_cluster_key_is_not_used_and_says_why(route: Route) -> None:
    keys: dict[str, Any] = {"api_keys": ("sk-user-0123456789",)}
    routed = route(servers=1, **keys)
    other = start(tiny_tokenizer(), FakeEngine, **keys)
    routed.servers.append(other)
    announcer = Announcer([routed.url], other.url, Role.BOTH, CLUSTER_KEY)
    announcer.start()
    assert announcer.announce(State.READY, wait_s=HANGS_S) == []
    member = next(each for each in routed.router.members.all if each.url == other.url)
    routed.until(lambda: "it refuses this router (HTTP 403: " in member.why)
    assert member.why.endswith("give both the same --cluster-key-file")
    announcer.close(HANGS_S)


def test_members_route_without_any_key_is_open_and_with_api_keys_alone_is_not() -> None:
    for keys, status in (({}, 200), ({"api_keys": ("sk-user-0123456789",)}, 403)):
        routed = start_router([], [], cluster_key=b"", **keys)
        try:
            assert post(routed, auth=None).status_code == status
        finally:
            routed.close()


@pytest.mark.parametrize(
    "wrong",
    [{"instance": "x"}, {"state": "well"}, {"role": "null"}, {"sequence": -1}, {"url": "http://b:port"}, {"x": 1}],
)
def test_members_route_malformed_announcement_is_a_400(route: Route, wrong: dict[str, Any]) -> None:
    routed = route(servers=1)
    said = {**msgspec.to_builtins(announcement(1)), **wrong}
    assert post(routed, said).status_code == 400
    assert len(routed.router.members.all) == 1
    late = announcement(2, State.GONE), announcement(3)
    assert [post(routed, each).status_code for each in late] == [200, 409]


def test_members_route_administration_reaches_every_member(route: Route) -> None:
    routed = route(servers=2)
    first, second = routed.servers
    ask(routed, LONG)
    with routed.client() as http:
        flushed = http.post("/flush_cache")
        assert flushed.json()["success"]
        assert len(routed.router.members.prefixes) == 0
        slept = http.post("/sleep?level=1")
        loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x"})
        unloaded = http.post("/unload_lora_adapter", json={"lora_name": "x"})
    assert [(each["url"], each["status"]) for each in flushed.json()["members"]] == [
        (first.url, 200),
        (second.url, 200),
    ]
    assert [server.engine.flushed for server in routed.servers] == [1, 1]
    assert slept.json()["success"], slept.text
    for answer in (loaded, unloaded):
        assert answer.status_code >= 400
        assert [each["status"] for each in answer.json()["members"]] == [answer.status_code] * 2
        assert answer.json()["error"]["message"].startswith(first.url)
    second.close()
    with routed.client() as http:
        flushed = http.post("/flush_cache")
    assert (flushed.status_code, flushed.json()["members"][1]["answer"]["error"]["code"]) == (503, "member_lost")


def test_members_route_standby_learns_what_the_active_router_learns(route: Route) -> None:
    active = route(servers=2)
    standby = start_router([], [], active.servers)
    try:
        ask(active, LONG)  # before the standby is known: part of the table that is sent first
        active.loop.call_soon_threadsafe(
            lambda: active.router.spawn(
                Standby(
                    standby.url,
                    active.router.members.prefixes,
                    CLUSTER_KEY,
                    active.router.metrics,
                    router_id=active.router.id,
                ).run()
            )
        )
        known, theirs = (each.router.members.prefixes for each in (active, standby))
        standby.until(lambda: len(theirs) == len(known) > 0)
        ask(active, "b" * 2000)
        standby.until(lambda: [*theirs.entries()] == [*known.entries()])
        assert where(ask(standby, "b" * 2000)) == (active.servers[1].url, "prefix")
        active.loop.call_soon_threadsafe(known.forget, active.servers[1].url)
        standby.until(lambda: {url for url, _, _ in theirs.entries()} == {active.servers[0].url})
    finally:
        standby.servers = []
        standby.close()


class Adapted(FakeEngine):
    """Has the adapters that it was told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        facts = {"number": 1, "path": "/a", "rank": 1, "num_bytes": 1, "num_users": 0, "digest": ""}
        return {name: LoadedAdapter(name=name, **facts) for name in self.names}


def test_members_route_models_are_those_that_all_members_have(route: Route) -> None:
    routed = route(servers=2, make=Adapted)
    first, second = routed.servers
    first.engine.names, second.engine.names = ["one", "two"], ["two", "three"]
    with routed.client() as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "two"]
        found = {name: http.get(f"/v1/models/{name}").status_code for name in ("tiny", "one", "two", "three", "none")}
        assert found == {"tiny": 200, "one": 404, "two": 200, "three": 404, "none": 404}
        second.close()
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "one", "two"]


def test_members_route_stored_response_is_found_wherever_it_is(route: Route) -> None:
    routed = route(servers=2, responses_store_bytes=1 << 20)
    with routed.client() as http:
        made = [http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()["id"] for _ in range(4)]
        assert [http.get(f"/v1/responses/{each}").status_code for each in made] == [200] * 4
        assert http.delete(f"/v1/responses/{made[0]}").status_code == 200
        assert http.get(f"/v1/responses/{made[0]}").status_code == 404
    assert all(server.engine.submitted for server in routed.servers)
