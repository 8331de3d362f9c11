"""Loops of routers: a request ends at the second visit of a router, and health checks take loops apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers

from forebay.http.errors import HttpError
from forebay.route.announcement import Role
from forebay.route.hops import LOOP, MOST_HOPS, PATH, VIA, hops, loop_of, path_of_info, shortest_path
from forebay.route.members import Member
from forebay.route.standby import Batch
from tests.route.conftest import PROVEN, Route, Routed, start_router

A, B, C = "a" * 32, "b" * 32, "c" * 32
OTHERS = [f"{number:032x}" for number in range(MOST_HOPS)]


def headers(*values: str) -> Headers:
    return Headers(raw=[(VIA.encode(), value.encode()) for value in values])


@pytest.mark.parametrize(
    ("values", "passed"),
    [((), A), ((B,), f"{B}, {A}"), ((f"{B},{C}",), f"{B}, {C}, {A}"), ((B, C), f"{B}, {C}, {A}")],
)
def test_hops_names_the_routers_that_were_passed_and_this_one(values: tuple[str, ...], passed: str) -> None:
    assert hops(headers(*values), A) == passed


@pytest.mark.parametrize(
    ("value", "status"),
    [(A, 508), (f"{B}, {A}", 508), (",".join(OTHERS), 508), ("", 400), ("1", 400), (f"{B},", 400), (A.upper(), 400)],
)
def test_hops_of_a_loop_or_of_a_client_are_refused(value: str, status: int) -> None:
    with pytest.raises(HttpError) as refused:
        hops(headers(value), A)
    assert refused.value.status == status
    assert hops(headers(",".join(OTHERS[:-1])), A).count(",") == MOST_HOPS - 1


@pytest.mark.parametrize("path", [None, "a", {}, 5, [5, None, {}, [A], "a", A.upper()]])
def test_path_of_an_info_in_another_shape_is_empty(path: Any) -> None:
    assert path_of_info({PATH: path}) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ([], ""),
        ([B], ""),
        ([B, C], ""),
        (OTHERS[:-1], ""),
        (OTHERS, "8 routers are between it and a server, and 7 may be"),
        ([A], "it is this router itself"),
        ([A, B], "it is this router itself"),
        ([B, A], "it is a router that sends requests to this one"),
        ([B, C, A], "it is a router that sends requests to this one"),
    ],
)
def test_member_whose_way_leads_through_this_router_is_of_no_use(path: list[str], why: str) -> None:
    assert loop_of(A, {PATH: path}) == why


def test_shortest_path_is_that_of_a_server_if_there_is_one() -> None:
    through = [{PATH: [B, C]}, {PATH: [C]}]
    assert shortest_path(A, through) == [A, C]
    assert shortest_path(A, [*through, {"engine": {}}]) == [A]
    assert shortest_path(A, []) == [A]


def ask(routed: Routed, **options: Any) -> httpx.Response:
    with routed.client() as http:
        return http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, **options)


def name(routed: Routed, other: Routed) -> Member:
    """Make a router a member of another one, that is up until the next check."""
    members = routed.router.members
    members.configure(other.url, Role.BOTH)
    member = next(each for each in members.all if each.url == other.url)
    member.up, member.checks_to_info = True, 100
    return member


@pytest.fixture
def pair(route: Route) -> Iterator[tuple[Routed, Routed]]:
    """A router with a server, and another one; each names the other."""
    first = route(servers=1)
    second = start_router([], [])
    name(first, second)
    name(second, first)
    try:
        yield first, second
    finally:
        second.close()


def test_routers_that_name_each_other_answer_each_request_while_there_is_a_server(pair: tuple[Routed, Routed]) -> None:
    for routed in (*pair, *pair, *pair):
        assert ask(routed).status_code == 200, ask(routed).text


def test_routers_that_name_each_other_end_a_request_at_once_without_a_server(pair: tuple[Routed, Routed]) -> None:
    first, second = pair
    server = first.router.members.all[0]
    server.down("ended")
    answers = [ask(routed) for routed in pair]
    found = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert found == [(508, LOOP), (503, "no_server")], "a failed attempt is followed by a health check"
    sent = [member.num_requests for routed in pair for member in routed.router.members.all]
    assert sum(sent) <= 4, "one at each router"
    assert second.router.members.all[0].in_flight == 0


def check(*routers: Routed) -> None:
    """Check all members, and read what their servers say of themselves, until that has gone around."""
    for _ in range(3):
        for routed in routers:
            for member in routed.router.members.all:
                member.checks_to_info = 0
            routed.check()


def test_health_checks_leave_out_a_router_that_leads_back_and_none_is_ready_without_a_server(
    pair: tuple[Routed, Routed],
) -> None:
    first, second = pair
    (to_server, to_second), (to_first,) = first.router.members.all, second.router.members.all
    check(*pair)
    assert (to_server.up, to_second.up, to_first.up) == (True, False, True)
    assert to_second.why == "it is a router that sends requests to this one: leave it out of this router's servers"
    assert {ask(routed).status_code for routed in pair} == {200}
    first.servers[0].close()
    check(*pair)
    assert not any(routed.router.members.ready for routed in pair)
    assert {ask(routed).status_code for routed in pair} == {503}


def test_routers_with_servers_of_their_own_may_name_each_other(route: Route) -> None:
    pair = route(servers=1), route(servers=1)
    name(*pair)
    name(*reversed(pair))
    check(*pair)
    assert all(member.up for routed in pair for member in routed.router.members.all)
    assert {ask(routed).status_code for routed in pair * 3} == {200}


def test_router_is_never_its_own_member(route: Route) -> None:
    routed = route(servers=1)
    itself = name(routed, routed)
    assert {ask(routed).status_code for _ in range(4)} == {200}
    itself.checks_to_info = 0
    routed.check()
    assert (itself.up, itself.why) == (
        False,
        "it is this router itself: leave it out of this router's servers",
    )


def test_administration_leaves_out_answers_of_a_loop(pair: tuple[Routed, Routed]) -> None:
    first, _ = pair
    with first.client() as http:
        answer = http.post("/flush_cache").json()
    assert [(each["url"], each["status"]) for each in answer["members"]] == [(first.servers[0].url, 200)]


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/debug/state", "/flush_cache"])
def test_routes_that_forward_refuse_a_second_visit(route: Route, path: str) -> None:
    routed = route(servers=1)
    method = "GET" if path in ("/v1/models", "/debug/state") else "POST"
    with routed.client() as http:
        answer = http.request(method, path, headers={VIA: routed.router.id}, json={"prompt": "a"})
    assert answer.status_code == 508 or answer.json()["members"][0]["status"] == 508, answer.text


def test_router_that_is_its_own_standby_keeps_its_prefix_table(route: Route) -> None:
    routed = route(servers=1)
    members = routed.router.members
    members.prefixes.record([bytes(16)], routed.servers[0].url)
    batch = Batch(begins_anew=True, changes=[])
    sent = {VIA: routed.router.id, "content-type": "application/json"}  # as `Standby` sends it
    with routed.client(auth=PROVEN) as http:
        answer = http.post("/members/prefixes", headers=sent, content=msgspec.json.encode(batch))
    assert (answer.status_code, len(members.prefixes)) == (508, 1)
