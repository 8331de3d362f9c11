"""However a request to a server ends, the server counts it once and gets its connection back once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import Unavailable
from forebay.base.http_client import Origin
from forebay.route.exchange import Exchange, RoutedRequest, SentRequest, _outcome, begin
from forebay.route.generation import _end
from forebay.route.router import Router
from forebay.route.selection import Reason, Selected
from forebay.route.upstream import Head
from tests.server.conftest import CONFIG

REQUEST = RoutedRequest(path="/v1/completions", headers={}, content=b"{}", select=Any, on_selected=Any, on_failed=Any)


class Upstream:
    at_rest = True

    def send(self, *request: object) -> None:
        pass

    def relay(self) -> None:
        pass

    async def head(self) -> None:
        await asyncio.Event().wait()

    async def ended(self) -> None:
        raise Unavailable("closed the connection before its answer was complete")


class Heads(Upstream):
    """An upstream whose answer begins once `come` has a result."""

    async def head(self) -> Any:
        self.come: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        return await self.come


class Pool:
    origin = Origin("http://127.0.0.1:1")

    def __init__(self, error: Unavailable | None = None) -> None:
        self.error, self.returned = error, list[object]()

    async def take(self) -> Upstream:
        if self.error:
            raise self.error
        return Upstream()

    def give_back(self, upstream: object) -> None:
        self.returned.append(upstream)


def member(error: Unavailable | None = None, obstacle: str = "") -> Any:
    facts = {"bootstrap_port": 0, "in_flight": 0, "num_requests": 0, "obstacle": lambda now: obstacle}
    return SimpleNamespace(url="http://m", pool=Pool(error), proof=lambda *message: dict(message[2]), **facts)


async def settled() -> None:
    """Let all tasks run as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


def sent(of: Any) -> SentRequest:
    return SentRequest(of, Upstream())  # type: ignore[arg-type]


def test_sent_request_ended_twice_returns_its_connection_once() -> None:
    server = member()
    one = sent(server)
    assert server.in_flight == 1
    one.end()
    one.end()
    assert (server.in_flight, len(server.pool.returned)) == (0, 1)


def test_halves_first_ends_where_the_second_cannot_begin() -> None:
    prefill, decode, lost = member(), member(Unavailable("not reached")), []
    members: Any = SimpleNamespace(lost=lambda server, why: lost.append(server), now=0.0)
    with pytest.raises(Unavailable, match="not reached"):
        asyncio.run(begin(members, Selected((prefill, decode), Reason.LOAD), REQUEST))
    assert lost == [decode]
    assert (prefill.in_flight, prefill.num_requests, len(prefill.pool.returned)) == (0, 1, 1)


def test_sent_request_to_a_server_that_drains_since_it_was_selected_is_not_sent() -> None:
    """The announcement came while the router connected; its answer promises that no request follows."""
    server, lost = member(obstacle="it is draining"), list[Any]()
    members: Any = SimpleNamespace(lost=lambda server, why: lost.append(server), now=0.0)
    with pytest.raises(Unavailable, match="draining"):
        asyncio.run(begin(members, Selected((server,), Reason.LOAD), REQUEST))
    assert (lost, server.num_requests, len(server.pool.returned)) == ([], 0, 1)


def test_halves_drained_prefill_ends_also_where_its_connection_breaks() -> None:
    prefill, decode = member(), member()
    asyncio.run(Exchange([sent(prefill), sent(decode)]).drain())
    assert (prefill.in_flight, decode.in_flight) == (0, 1)


@pytest.mark.parametrize(("at_rest", "gone", "drained"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_halves_are_drained_only_behind_a_whole_answer_of_a_client_that_waits(
    at_rest: bool, gone: bool, drained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upstream, "at_rest", at_rest)
    prefill, decode, spawned = member(), member(), list[Any]()
    exchange = Exchange([sent(prefill), sent(decode)])
    exchange.gone = gone
    _end(SimpleNamespace(spawn=spawned.append), exchange)  # type: ignore[arg-type]
    assert (prefill.in_flight, decode.in_flight, len(spawned)) == (drained, 0, drained)
    for work in spawned:
        work.close()


def test_halves_prefill_that_refuses_first_is_the_answer_and_decode_s_is_awaited_no_longer() -> None:
    refusal = Head(503, {})
    prefill, decode = (SentRequest(member(), Heads()) for _ in range(2))  # type: ignore[arg-type]

    async def answer() -> None:
        waiting = asyncio.create_task(Exchange([prefill, decode]).answer())
        await settled()
        prefill.upstream.come.set_result(refusal)  # type: ignore[attr-defined]
        assert await waiting == (prefill, refusal)
        await settled()
        assert decode.upstream.come.cancelled()  # type: ignore[attr-defined]

    asyncio.run(answer())


def test_halves_answer_is_decode_s_whatever_a_prefill_that_accepts_answers() -> None:
    prefill, decode = (SentRequest(member(), Heads()) for _ in range(2))  # type: ignore[arg-type]
    accepted = Head(200, {})

    async def answer() -> None:
        waiting = asyncio.create_task(Exchange([prefill, decode]).answer())
        await settled()
        prefill.upstream.come.set_result(accepted)  # type: ignore[attr-defined]
        await settled()
        assert not waiting.done()
        decode.upstream.come.set_result(Head(400, {}))  # type: ignore[attr-defined]
        assert await waiting == (decode, Head(400, {}))

    asyncio.run(answer())


def test_c27_halves_whose_answer_nobody_waits_for_any_more_end() -> None:
    prefill, decode = member(), member()

    async def cancelled() -> None:
        waiting = asyncio.create_task(_outcome(Exchange([sent(prefill), sent(decode)])))
        for _ in range(3):
            await asyncio.sleep(0)
        assert (prefill.in_flight, decode.in_flight) == (1, 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(cancelled())
    assert (prefill.in_flight, decode.in_flight) == (0, 0)


def test_c27_halves_under_way_end_with_the_router() -> None:
    prefill, decode = member(), member()

    async def close() -> None:
        router = Router(CONFIG, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
        router.under_way.add(Exchange([sent(prefill), sent(decode)]))
        await router.close(0.0)

    asyncio.run(close())
    assert (prefill.in_flight, decode.in_flight) == (0, 0)
