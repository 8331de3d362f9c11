"""Connections to servers behind the router: which are used again, and what becomes of those that break (C27)."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import Unavailable
from forebay.base.http_client import Origin
from forebay.route import upstream
from forebay.route.generation import _Relayed
from forebay.route.upstream import MEMBER_LOST, Pool, Upstream


def asked(answer: bytes, num_times: int, *, closes: bool = False) -> int:
    """Ask a server that gives this `answer` so many times; return how many connections that took."""
    num_connections, served = 0, list[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        served.append(asyncio.current_task())
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            writer.write(answer)
            if closes:
                break
        writer.close()
        await writer.wait_closed()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            pool = Pool(Origin(f"http://{host}:{port}", ""))
            for _ in range(num_times):
                await pool.ask("GET", "/", {})
            pool.close()
            await asyncio.gather(*(task for task in served if task))

    asyncio.run(ask())
    return num_connections


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n"


def test_upstream_idle_connection_is_used_again() -> None:
    assert asked(OK + b"\r\n", 3) == 1


def test_upstream_answer_behind_interim_ones_is_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    assert asked(interim + OK + b"\r\n", 3) == 1


@pytest.mark.parametrize("rest", [b"\r\n", b"Upgrade: x\r\nConnection: upgrade\r\n\r\nabc"])
def test_upstream_server_that_switches_protocols_is_lost(rest: bytes) -> None:
    with pytest.raises(Unavailable, match="does not speak HTTP") as lost:
        asked(b"HTTP/1.1 101 Switching Protocols\r\n" + rest, 1)
    assert lost.value.code == MEMBER_LOST


async def test_upstream_connection_is_checked_by_the_kernel_while_it_is_silent() -> None:
    """A server whose machine has gone sends no FIN: without keepalive a request waits for its own time-out."""
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connection = await Upstream.connect(Origin(f"http://{host}:{port}"))
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]
        connection.close()
        await served.wait()


def test_upstream_connection_idle_for_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "IDLE_S", 0.0)
    assert asked(OK + b"\r\n", 3) == 3


def test_upstream_server_that_says_close_is_not_asked_on_that_connection_again() -> None:
    assert asked(OK + b"Connection: close\r\n\r\n", 3) == 3


def test_c27_upstream_server_that_closes_before_its_answer_is_whole_is_lost() -> None:
    with pytest.raises(Unavailable) as raised:
        asked(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", 1, closes=True)
    assert raised.value.code == MEMBER_LOST


def test_c27_client_that_reads_too_slowly_ends_both_halves() -> None:
    aborted: list[int] = []
    connection: Any = SimpleNamespace(write_chunk=lambda piece: piece == b"taken")
    context: Any = SimpleNamespace(connection=connection, send=None)
    exchange: Any = SimpleNamespace(abort=lambda: aborted.append(1))
    router: Any = None
    relayed = _Relayed(router, context, exchange, {}, AsyncExitStack())
    relayed._write(b"taken")
    assert aborted == []
    relayed._write(b"not taken")
    assert aborted == [1]


def test_c27_upstream_broken_connection_fails_whoever_waits_for_its_head_or_end() -> None:
    async def broken() -> list[object]:
        connection = Upstream(Origin("http://127.0.0.1:1", ""))
        waiting = [asyncio.ensure_future(connection.head()), asyncio.ensure_future(connection.ended())]
        await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return [waiter.done() and getattr(waiter.exception(), "code", "") for waiter in waiting]

    assert asyncio.run(broken()) == [MEMBER_LOST, MEMBER_LOST]


class Connection:
    def __init__(self, *, at_rest: bool = True) -> None:
        self.at_rest, self.is_open = at_rest, True

    def close(self) -> None:
        self.is_open = False


def test_upstream_pool_closes_what_is_not_at_rest_or_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_IDLE", 2)
    connections: Any = [Connection(), Connection(at_rest=False), Connection(), Connection()]

    async def give_back() -> None:
        pool = Pool(Origin("http://127.0.0.1:1", ""))
        for connection in connections:
            pool.give_back(connection)

    asyncio.run(give_back())
    assert [connection.is_open for connection in connections] == [True, False, True, False]


def test_upstream_pool_that_gives_up_closes_what_is_taken_and_no_more() -> None:
    connections: Any = [Connection(), Connection()]

    async def give_up() -> None:
        pool = Pool(Origin("http://127.0.0.1:1", ""))
        for connection in connections:
            pool.give_back(connection)
        both = [await pool.take(), await pool.take()]
        pool.give_back(both[0])
        pool.give_up()
        assert [connection.is_open for connection in both] == [True, False]

    asyncio.run(give_up())


def test_c33_upstream_server_that_answers_unasked_is_closed() -> None:
    class Wire:
        is_open = True

        def is_closing(self) -> bool:
            return not self.is_open

        def get_extra_info(self, name: str) -> None:
            return None

        def close(self) -> None:
            self.is_open = False

    async def unasked() -> bool:
        connection, transport = Upstream(Origin("http://127.0.0.1:1", "")), Wire()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(OK + b"\r\n")
        return connection.is_open

    assert not asyncio.run(unasked())


def test_c27_upstream_server_that_does_not_speak_http_is_lost_and_named_so() -> None:
    with pytest.raises(Unavailable, match="does not speak HTTP") as raised:
        asked(b"SSH-2.0-there\r\n", 1, closes=True)
    assert raised.value.code == MEMBER_LOST
