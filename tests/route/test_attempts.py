"""Which answers of a server let a request begin again at other servers, and the end of both requests (C27)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import ForebayError, Unavailable
from forebay.http.bodies import ClientGone
from forebay.route import exchange
from forebay.route.exchange import MOST_ATTEMPTS, Exchange, RoutedRequest, first_answer
from forebay.route.generation import _whole
from forebay.route.selection import Reason, Selected
from forebay.route.upstream import MEMBER_LOST, Head
from tests.simulation.virtual_time import VirtualLoop


class Member:
    def __init__(self) -> None:
        self.num_checks, self.up = 0, True


class Attempt(Exchange):
    """Both requests under way, of which decode answers with `status`."""

    def __init__(self, status: int, members: list[Member]) -> None:
        self.status, self.num_ends, self.gone, self.is_open = status, 0, False, True
        self.sent = [SimpleNamespace(member=member, upstream=self) for member in members]  # type: ignore[misc]

    async def whole(self) -> bytes:
        return b'{"error": {"message": "why", "code": "its_code"}}'

    async def answer(self) -> Any:
        return self.answering, Head(self.status, {})

    def end(self) -> None:
        self.num_ends += 1


class Attempts:
    """In place of `begin`: one attempt for each of `statuses`; None for a server that cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *statuses: int | None, leaves: bool = False) -> None:
        self.statuses, self.made, self.leaves = list(statuses), [], leaves
        self.members, self.health = [Member(), Member()], self
        self.tried: list[set[Any]] = []
        self.recovers = False
        monkeypatch.setattr(exchange, "begin", self.begin)

    async def begin(self, *args: object) -> Attempt:
        status = self.statuses.pop(0)
        if status is None:
            self.made.append(None)
            self.members[0].up = False
            raise Unavailable("nobody listens", code=MEMBER_LOST)
        self.made.append(Attempt(status, self.members))
        return self.made[-1]

    def select(self, tried: Any) -> Selected[Any]:
        self.tried.append({*tried})
        return Selected(tuple(self.members), Reason.LOAD)

    def may_recover(self, tried: Any) -> bool:
        return self.recovers

    async def recovery(self) -> None:
        pass

    async def check_now(self, member: Member) -> None:
        member.num_checks += 1

    def run(self) -> tuple[Exchange, Head]:
        watch: Any = SimpleNamespace(gone=self.leaves, on_gone=lambda abort: abort() if self.leaves else None)
        self.failed: list[str] = []
        routed = RoutedRequest(
            path="/", headers={}, content=b"", select=self.select,
            on_selected=lambda _: None, on_failed=lambda _, error: self.failed.append(error.code),
        )  # fmt: skip
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(first_answer(self, routed, watch))  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [400, 429, 500, 502])
def test_first_answer_failure_that_others_would_repeat_is_raised_at_once(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    attempts = Attempts(monkeypatch, status, 200)
    with pytest.raises(ForebayError) as failed:
        attempts.run()
    assert (failed.value.status, failed.value.code, len(attempts.made)) == (status, "its_code", 1)
    assert attempts.made[0].num_ends == 1


@pytest.mark.parametrize("status", [503, 504])
def test_first_answer_server_that_comes_or_goes_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    attempts = Attempts(monkeypatch, status, 200)
    found, head = attempts.run()
    assert (found, head.status) == (attempts.made[1], 200)
    assert (attempts.made[0].num_ends, attempts.made[1].num_ends) == (1, 0)
    assert [member.num_checks for member in attempts.members] == [1, 1]
    assert attempts.tried == [set(), {*attempts.members}]


def test_first_answer_attempts_are_bounded_and_the_last_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, *[503] * (MOST_ATTEMPTS + 2))
    with pytest.raises(ForebayError, match="why"):
        attempts.run()
    assert [attempt.num_ends for attempt in attempts.made] == [1] * 3
    assert attempts.failed == ["its_code"] * 3


def test_first_answer_servers_that_are_gone_at_the_second_attempt_leave_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = Attempts(monkeypatch, None, None, None)
    failures = iter(["first", "second", "third"])
    begin = attempts.begin

    async def fails(*args: object) -> Attempt:
        try:
            return await begin(*args)
        except Unavailable as error:
            raise Unavailable(next(failures), code=error.code) from None

    monkeypatch.setattr(exchange, "begin", fails)
    with pytest.raises(Unavailable, match="first"):
        attempts.run()


@pytest.mark.parametrize(("gone", "error"), [(True, ClientGone), (False, Unavailable)])
def test_answer_that_breaks_is_a_failure_unless_the_client_has_gone(gone: bool, error: type[Exception]) -> None:
    async def whole() -> bytes:
        raise Unavailable("the connection broke", code=MEMBER_LOST)

    lost: list[Any] = []
    sent: Any = SimpleNamespace(member="m", upstream=SimpleNamespace(whole=whole, is_open=False))
    under_way = Exchange([sent])
    under_way.gone = gone
    router: Any = SimpleNamespace(members=SimpleNamespace(lost=lambda member, why: lost.append(member)))
    with pytest.raises(error):
        asyncio.run(_whole(router, under_way))
    assert lost == ([] if gone else ["m"])


def test_first_answer_without_any_server_that_is_up_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, made = Attempts(monkeypatch), []

    def select(tried: object) -> Any:
        made.append(1)
        raise Unavailable("no server takes the request", code="no_server")

    monkeypatch.setattr(attempts, "select", select)
    with pytest.raises(Unavailable, match="no server takes"):
        attempts.run()
    assert made == [1]


class Away(Attempts):
    """No server takes requests until so many selections have failed."""

    num_failures = 0

    def select(self, tried: Any) -> Selected[Any]:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise Unavailable("no server takes the request", code="no_server")
        return super().select(tried)


def test_first_answer_servers_that_may_recover_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Away(monkeypatch, 503, 200)
    attempts.num_failures, attempts.recovers = 9, True
    assert attempts.run()[1].status == 200
    assert attempts.tried == [set(), {*attempts.members}]


def test_first_answer_client_that_has_gone_waits_for_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Away(monkeypatch, leaves=True)
    attempts.num_failures, attempts.recovers = 2, True
    with pytest.raises(Unavailable):
        attempts.run()
    assert attempts.num_failures == 1


def test_first_answer_client_that_has_gone_gets_no_other_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, 503, 200, leaves=True)
    with pytest.raises(ForebayError):
        attempts.run()
    assert len(attempts.made) == 1


def test_first_answer_server_that_cannot_be_reached_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, None, 200)
    assert attempts.run()[1].status == 200
    assert attempts.tried == [set(), {attempts.members[0]}]
