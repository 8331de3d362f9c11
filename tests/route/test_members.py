"""When a member is down, and when the requests that wait for it fail (C27); what the router answers itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.datastructures import Headers

from forebay.base.errors import Unavailable
from forebay.base.http_client import Origin
from forebay.config.config import ServerConfig
from forebay.config.engine_config import DisaggregationOptions
from forebay.route import forwarding, information, members
from forebay.route.administration import _at_all
from forebay.route.announcement import Role
from forebay.route.fleet import Fleet
from forebay.route.members import CHECKS_PER_INFO, GIVEN_UP_AFTER, Member, Members
from forebay.route.upstream import MEMBER_LOST, Head

URL = "http://one:1"


class Pool:
    """Answers `/ready` with `status` and `reason`, or fails with what it is given; counts what is given up."""

    def __init__(self, name: str = "one") -> None:
        self.origin, self.num_given_up = Origin(f"http://{name}:1", ""), 0
        self.status, self.reason, self.error, self.waits = 200, "ok", None, False
        self.version, self.mode = "0", "decode"

    async def ask(self, method: str, path: str, *others: object) -> tuple[Head, bytes]:
        if self.waits:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        if path == "/server_info":
            info = {"disaggregation_mode": self.mode, "weight_version": self.version}
            return Head(200, {}), json.dumps(info).encode()
        return Head(self.status, {}), b'{"reason": "%s"}' % self.reason.encode()

    def give_up(self) -> None:
        self.num_given_up += 1


def checked(pool: Pool, times: int = 1, found: Members | None = None) -> tuple[Members, Member]:
    """Members of which one has this pool, and that one, after so many checks."""
    found = found or Members({Role.DECODE: [URL]})
    [one] = found.all
    one.pool = pool  # type: ignore[assignment]
    for _ in range(times):
        asyncio.run(found.health.check_all())
    return found, one


@pytest.mark.parametrize(
    ("status", "is_configured", "shared"),
    [(401, True, "--api-key-file"), (401, False, "--cluster-key-file"), (403, True, "--cluster-key-file")],
)
def test_member_that_refuses_the_router_says_which_key_both_need(status: int, is_configured: bool, shared: str) -> None:
    """A server of the command line is checked with a key of users, one that is announced with a proof."""

    class Refusing(Pool):
        async def ask(self, method: str, path: str, *others: object) -> tuple[Head, bytes]:
            return Head(status if path == "/server_info" else 200, {}), b"{}"

    found = Members({Role.DECODE: [URL]})
    found.all[0].is_configured = is_configured
    assert checked(Refusing(), found=found)[1].why.endswith(f"give both the same {shared}")


def test_members_that_have_just_been_ready_may_recover() -> None:
    now = [0.0]
    found = Members({Role.BOTH: [URL]}, hold_s=10.0, clock=lambda: now[0])
    [one] = found.all
    assert not found.health.may_recover()  # none has ever been ready
    pool = Pool()
    pool.mode = "null"
    checked(pool, found=found)
    assert found.ready
    assert not found.health.may_recover()
    now[0] = 5.0
    checked(pool, found=found)
    one.down("asleep")
    now[0] = 14.9
    assert found.health.may_recover()
    assert not found.health.may_recover([one])  # it has failed this request
    now[0] = 15.0
    assert not found.health.may_recover()


def test_member_that_passes_a_check_wakes_the_requests_that_wait_for_one() -> None:
    found, one = checked(pool := Pool())

    async def woken() -> list[bool]:
        waiting = asyncio.ensure_future(found.health.recovery())
        done = []
        for pool.status in (503, 200):
            await asyncio.sleep(0)
            await found.health.check(one)
            for _ in range(3):
                await asyncio.sleep(0)
            done.append(waiting.done())
        await waiting
        return done

    assert asyncio.run(woken()) == [False, True]


def test_member_that_answers_is_up_and_one_that_does_not_is_down(monkeypatch):
    monkeypatch.setattr(members, "CHECK_TIMEOUT_S", 0.0)
    pool = Pool()
    found, one = checked(pool)
    monkeypatch.undo()
    check = lambda: checked(pool, found=found)  # noqa: E731
    check()
    assert one.up
    pool.error = Unavailable("nobody listens", code=MEMBER_LOST)
    check()
    assert (one.up, one.why) == (False, "nobody listens")
    pool.error, pool.status, pool.reason = None, 503, "loading"
    check()
    assert (one.up, one.why) == (False, "loading")
    pool.status = 200
    check()
    assert one.up
    monkeypatch.setattr(members, "CHECK_TIMEOUT_S", 0.0)
    pool.waits = True
    check()
    assert (one.up, one.why) == (False, "no answer within 0 s")


@pytest.mark.parametrize(("reason", "num_given_up"), [("error", 1), ("queue_full", 0), ("asleep", 0)])
def test_member_at_which_nobody_works_gives_up_its_requests(reason, num_given_up):
    pool = Pool()
    found, _ = checked(pool)
    pool.status, pool.reason = 503, reason
    checked(pool, GIVEN_UP_AFTER - 1, found)
    assert pool.num_given_up == 0
    checked(pool, 3, found)
    assert pool.num_given_up == num_given_up


def test_member_check_reads_a_new_weight_version_now_and_then_or_at_once():
    pool = Pool()
    found, one = checked(pool)
    pool.version = "1"
    checked(pool, CHECKS_PER_INFO - 1, found)
    assert one.version == ("", "0")
    checked(pool, 1, found)
    assert one.version == ("", "1")
    pool.version = "2"
    asyncio.run(found.health.check_now(one))
    assert one.version == ("", "2")


def test_member_that_is_busy_for_long_stays_up_without_its_information(monkeypatch):
    """A server reads its engine's state for /server_info, which may wait for a step."""
    pool = Pool()
    found, one = checked(pool)
    ask = pool.ask

    async def slow(method: str, path: str, *others: object) -> tuple[Head, bytes]:
        return await (asyncio.Event().wait() if path == "/server_info" else ask(method, path, *others))  # type: ignore[return-value]

    pool.ask = slow  # type: ignore[method-assign]
    monkeypatch.setattr(members, "INFO_TIMEOUT_S", 0.01)
    checked(pool, CHECKS_PER_INFO + 1, found)
    assert one.up
    pool.ask, pool.version = ask, "1"  # type: ignore[method-assign]
    monkeypatch.undo()
    checked(pool, 1, found)
    assert one.version == ("", "1")


def test_member_lost_during_a_check_stays_down():
    """The answer was written before the server went down."""
    pool = Pool()
    found, one = checked(pool, 0)
    ask = pool.ask

    async def lost(*words: object) -> tuple[Head, bytes]:
        answer = await ask(*words)  # type: ignore[arg-type]
        found.lost(one, "it ended")
        return answer

    pool.ask = lost  # type: ignore[method-assign]
    checked(pool, 1, found)
    assert (one.up, one.why) == (False, "it ended")
    pool.ask = ask  # type: ignore[method-assign]
    checked(pool, 1, found)
    assert one.up


# -- what the router says itself -----------------------------------------------------------------------------------


def pairs_up(num: int = 1) -> Members:
    urls = [f"http://host:{port}" for port in range(1, num + 1)]
    found = Members({Role.PREFILL: urls, Role.DECODE: [f"{url}0" for url in urls]})
    for one in found.all:
        one.up = True
    return found


def test_router_that_drains_is_not_ready():
    router: Any = SimpleNamespace(lifecycle=SimpleNamespace(draining=False), members=pairs_up())
    request: Any = None
    assert asyncio.run(information.ready(request, router)).status_code == 200
    router.lifecycle.draining = True
    assert asyncio.run(information.ready(request, router)).status_code == 503
    router.lifecycle.draining, router.members.all[1].up = False, False
    assert asyncio.run(information.ready(request, router)).status_code == 503


@pytest.mark.parametrize(
    ("accepted", "accepts"), [((), False), ((True, True), True), ((True, False), False), ((True, None), False)]
)
def test_server_info_of_router_accepts_images_if_all_members_do(
    accepted: tuple[bool | None, ...], accepts: bool
) -> None:
    found = Members({Role.BOTH: [f"http://host:{port}" for port in range(1, 1 + len(accepted))]})
    for member, each in zip(found.all, accepted, strict=True):
        member.info = {"weight_version": "0"} if each is None else {"accepts_images": each}
    request, router = cast(Any, None), cast(Any, SimpleNamespace(members=found))
    answer = asyncio.run(information.server_info(request, router))
    assert json.loads(bytes(answer.body))["accepts_images"] is accepts


@pytest.mark.parametrize(
    ("others", "is_common"), [([{"weights": "a"}], True), ([{"weights": "b"}], False), ([{}], False)]
)
def test_server_info_of_router_has_the_environment_that_all_members_have(
    others: list[dict[str, str]], is_common: bool
) -> None:
    environments = [{"weights": "a"}, *others]
    found = Members({Role.BOTH: [f"http://host:{port}" for port in range(1, 1 + len(environments))]})
    for member, each in zip(found.all, environments, strict=True):
        found.checked(member, {"environment": each}, member.num_downs)
    request, router = cast(Any, None), cast(Any, SimpleNamespace(members=found))
    answer = asyncio.run(information.server_info(request, router))
    assert json.loads(bytes(answer.body))["environment"] == (environments[0] if is_common else None)


def test_router_member_that_does_not_answer_in_time_is_told_of(monkeypatch):
    monkeypatch.setattr(forwarding, "ASK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(forwarding, "RequestContext", SimpleNamespace(of=lambda scope: SimpleNamespace(request_id="r")))
    pool = Pool()
    pool.waits = True
    scope = {"raw_path": b"/v1/models", "query_string": b""}
    request: Any = SimpleNamespace(method="GET", headers=Headers(), scope=scope)
    with pytest.raises(Unavailable) as failed:
        asyncio.run(forwarding.ask(request, "0" * 32, checked(pool, 0)[1]))
    assert failed.value.code == MEMBER_LOST


def test_router_administration_that_one_member_refuses_is_refused(monkeypatch):
    statuses = iter([200, 409, 200, 200])

    async def ask(*args: object) -> tuple[Head, bytes]:
        return Head(status := next(statuses), {}), b'{"error": {"message": "why"}}' if status == 409 else b"{}"

    async def check(member: Member) -> None: ...

    monkeypatch.setattr("forebay.route.administration.ask", ask)
    found = pairs_up(2)
    monkeypatch.setattr(found.health, "check_now", check)
    request: Any = SimpleNamespace(scope={"path": "/flush_cache"})
    router: Any = SimpleNamespace(id="0" * 32, members=found)
    answer = asyncio.run(_at_all(request, router, b"", empties_cache=True))
    said = members.as_object(bytes(answer.body))
    assert (answer.status_code, said["success"]) == (409, False)
    assert [each["status"] for each in said["members"]] == [200, 409, 200, 200]
    assert said["error"]["message"] == "http://host:2: why"


@pytest.mark.parametrize("holder", [Member, Fleet, ServerConfig, DisaggregationOptions])
def test_secret_is_not_in_the_text_of_its_holder(holder: type[Any]) -> None:
    """Such a text gets into a log or an error."""
    shown = {field.name: field.repr for field in dataclasses.fields(holder)}
    assert shown["cluster_key"] is False
    assert not any(shown.get(name) for name in ("key_names", "api_keys", "admin_api_keys"))
