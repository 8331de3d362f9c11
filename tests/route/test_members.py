"""Which member has the next request, when it is down, and when those who wait for it are told (C27)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import Unavailable
from forebay.base.http_client import Origin
from forebay.config.engine_config import DisaggregationMode
from forebay.route import app, members
from forebay.route.members import GIVEN_UP_AFTER, WORTH_WAITING, Member, Members
from forebay.route.upstream import MEMBER_LOST, Head


class Pool:
    """Answers `/ready` with `status` and `reason`, or fails with what it is given; counts what is given up."""

    def __init__(self, name: str = "one") -> None:
        self.origin, self.num_given_up = Origin(f"http://{name}:1", ""), 0
        self.status, self.reason, self.error, self.waits = 200, "ok", None, False

    async def ask(self, method: str, path: str, *others: object) -> tuple[Head, bytes]:
        if self.waits:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        if path == "/server_info":
            return Head(200, {}), b'{"disaggregation_mode": "decode"}'
        return Head(self.status, {}), b'{"reason": "%s"}' % self.reason.encode()

    def give_up(self) -> None:
        self.num_given_up += 1


def member(pool: Pool) -> Any:
    return Member(DisaggregationMode.DECODE, pool, {})  # type: ignore[arg-type]


def checked(one: Member, times: int = 1) -> Member:
    for _ in range(times):
        asyncio.run(one.check())
    return one


def test_member_that_answers_is_up_and_one_that_does_not_is_down(monkeypatch):
    monkeypatch.setattr(members, "CHECK_TIMEOUT_S", 0.0)
    pool = Pool()
    one = checked(member(pool))
    monkeypatch.undo()
    assert checked(one).up
    pool.error = Unavailable("nobody listens", code=MEMBER_LOST)
    assert (checked(one).up, one.why) == (False, "nobody listens")
    pool.error, pool.status, pool.reason = None, 503, "loading"
    assert (checked(one).up, one.why) == (False, "loading")
    pool.status = 200
    assert checked(one).up
    monkeypatch.setattr(members, "CHECK_TIMEOUT_S", 0.0)
    pool.waits = True
    assert (checked(one).up, one.why) == (False, "no answer within 0 s")


@pytest.mark.parametrize(("reason", "num_given_up"), [("error", 1), ("queue_full", 0), ("asleep", 0)])
def test_member_at_which_nobody_works_gives_up_its_requests(reason, num_given_up):
    pool = Pool()
    one = checked(member(pool))
    pool.status, pool.reason = 503, reason
    checked(one, GIVEN_UP_AFTER - 1)
    assert pool.num_given_up == 0
    checked(one, 3)
    assert pool.num_given_up == num_given_up


def all_up(num: int = 3) -> Members:
    origins = [Origin(f"http://host:{port}", "") for port in range(1, num + 1)]
    found = Members(origins, origins)
    for one in found.all:
        one.up = True
    return found


def test_members_decode_with_the_fewest_requests_under_way_is_chosen_and_of_these_the_one_that_had_fewest():
    found = all_up()
    for one, in_flight, total in zip(found.decode, (2, 1, 1), (0, 9, 5), strict=True):
        one.in_flight, one.num_requests = in_flight, total
    assert found.choose_decode() is found.decode[2]
    found.decode[2].up = False
    assert found.choose_decode() is found.decode[1]


def test_members_cached_beginning_is_worth_a_wait_and_not_every_wait():
    found = all_up(2)
    first = found.choose_prefill([b"a"])
    first.in_flight = WORTH_WAITING - 1
    assert found.choose_prefill([b"a", b"b"]) is first
    first.in_flight = WORTH_WAITING
    assert found.choose_prefill([b"a", b"b"]) is not first


def test_members_lost_one_is_counted_and_its_cache_is_forgotten():
    found = all_up(2)
    first = found.choose_prefill([b"a"])
    found.lost(first, "it ended")
    assert (first.num_failures, first.up, len(found.prefixes)) == (1, False, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_members_are_ready_with_both_roles(role):
    found = all_up(1)
    assert found.ready
    getattr(found, role)[0].up = False
    assert not found.ready
    with pytest.raises(Unavailable) as none:
        found.choose_prefill([]) if role == "prefill" else found.choose_decode()
    assert none.value.code == f"no_{role}_server"


# -- what the router says itself -----------------------------------------------------------------------------------


def test_router_that_drains_is_not_ready():
    router = SimpleNamespace(lifecycle=SimpleNamespace(draining=False), members=all_up(1))
    assert asyncio.run(app.ready(None, router)).status_code == 200  # type: ignore[arg-type]
    router.lifecycle.draining = True
    assert asyncio.run(app.ready(None, router)).status_code == 503  # type: ignore[arg-type]


def test_router_member_that_does_not_answer_in_time_is_told_of(monkeypatch):
    monkeypatch.setattr(app, "ASK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(app, "RequestContext", SimpleNamespace(of=lambda scope: SimpleNamespace(request_id="r")))
    pool = Pool()
    pool.waits = True
    request = SimpleNamespace(method="GET", headers={}, scope={"raw_path": b"/v1/models"})
    with pytest.raises(Unavailable) as failed:
        asyncio.run(app._ask(request, member(pool)))  # type: ignore[arg-type]
    assert failed.value.code == MEMBER_LOST


def test_router_flush_that_one_member_refuses_is_refused(monkeypatch):
    statuses = iter([200, 409, 200])

    async def ask(*args: object) -> tuple[Head, bytes]:
        return Head(next(statuses), {}), b"{}"

    monkeypatch.setattr(app, "_ask", ask)
    router = SimpleNamespace(members=all_up(2))
    router.members.prefill[0].up = False
    assert asyncio.run(app.flush_cache(None, router)).status_code == 409  # type: ignore[arg-type]
