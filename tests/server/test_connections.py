"""Who gives way where all connections are taken."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.http.protocol import MAX_PIPELINED, SPARE, ConnectionRoom, _BoundedHttpProtocol
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Guest:
    def __init__(self, room: ConnectionRoom) -> None:
        self.room = room
        self.over_cap = False
        self.gave_way = False
        self.working = False
        self.taken = room.enter(self)

    def give_way(self) -> None:
        assert not self.working
        self.gave_way = True

    def work(self) -> None:
        self.working = True
        self.room.work(self)

    def wait(self) -> None:
        self.working = False
        self.room.wait(self)


def test_the_one_that_has_waited_longest_gives_way() -> None:
    room = ConnectionRoom(3)
    first, second, third = (Guest(room) for _ in range(3))
    first.work()
    first.wait()  # it has been heard of since
    Guest(room)
    assert [guest.gave_way for guest in (first, second, third)] == [False, True, False]
    Guest(room)
    assert [guest.gave_way for guest in (first, second, third)] == [False, True, True]


def test_who_works_stays_and_newcomers_stand_in_the_door() -> None:
    room = ConnectionRoom(2)
    workers = [Guest(room), Guest(room)]
    for guest in workers:
        guest.work()
    late = [Guest(room) for _ in range(SPARE)]
    assert all(guest.taken and guest.over_cap for guest in late)
    assert Guest(room).taken
    assert late[0].gave_way
    assert not any(guest.gave_way for guest in (*workers, *late[1:]))


def test_where_all_work_even_in_the_door_nobody_else_comes_in() -> None:
    room = ConnectionRoom(1)
    for _ in range(1 + SPARE):
        Guest(room).work()
    assert not Guest(room).taken


@given(st.lists(st.tuples(st.sampled_from(["enter", "work", "wait", "leave"]), st.integers(0, 9)), max_size=200))
def test_there_are_never_more_than_the_cap_and_the_spare_ones(moves: list[tuple[str, int]]) -> None:
    room, guests = ConnectionRoom(3), []
    for move, number in moves:
        present = [guest for guest in guests if guest.taken and not guest.gave_way]
        assert len(present) <= 3 + SPARE
        if move == "enter" or not present:
            guests.append(Guest(room))
            # Somebody waits without a request: then the newcomer has a place.
            assert guests[-1].taken or all(guest.working for guest in present)
            continue
        guest = present[number % len(present)]
        if move == "leave":
            room.leave(guest)
            guests.remove(guest)
        elif move == "work":
            guest.work()
        else:
            guest.wait()


def test_idle_connections_do_not_keep_others_out(launch: Callable[..., Running]) -> None:
    """Never used, used and kept, with half a head, with half a body: none is worth a request that is whole."""
    server = launch(max_connections=8)
    idle = [server.connect() for _ in range(8)]
    for sock in idle[2:4]:
        ask(sock, HEALTH)
    for sock in idle[4:6]:
        sock.sendall(MODELS[:20])
    for sock in idle[6:]:
        sock.sendall(completion()[:-3])
    for _ in range(8):
        idle.append(server.connect())
        assert ask(idle[-1], MODELS).startswith(b"HTTP/1.1 200")
        assert ask(idle[-1], HEALTH).startswith(b"HTTP/1.1 200")
    for sock in idle:
        sock.close()


def test_what_is_cut_off_in_the_middle_is_told_why(
    launch: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, heard, receive = launch(max_connections=2), list[bytes](), _BoundedHttpProtocol.data_received

    def hear(self: _BoundedHttpProtocol, data: bytes) -> None:
        heard.append(data)
        receive(self, data)

    monkeypatch.setattr(_BoundedHttpProtocol, "data_received", hear)
    with server.connect() as head, server.connect() as body:
        for sock, part in ((head, MODELS[:20]), (body, completion()[:-3])):
            sock.sendall(part)
            server.until(lambda part=part: part in heard)
        kept = [server.connect() for _ in range(2)]
        for sock in kept:
            assert ask(sock, HEALTH).startswith(b"HTTP/1.1 200")
        for sock in (head, body):
            assert ask(sock, b"").startswith(b"HTTP/1.1 408")
        for sock in kept:
            sock.close()


def test_while_all_work_others_are_refused_but_health_answers(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(manual=True), max_connections=4)
    working = [server.connect() for _ in range(4)]
    for sock in working:
        sock.sendall(completion())
    server.until(lambda: len(server.engine.running) == 4)
    with server.connect() as sock:
        assert ask(sock, MODELS).startswith(b"HTTP/1.1 429")
        assert sock.recv(1) == b""
    with server.connect() as sock:
        answer = ask(sock, HEALTH)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
    assert len(server.engine.running) == 4
    for sock in working:
        sock.close()
    server.until(lambda: not server.engine.running)
    with server.connect() as sock:
        assert ask(sock, MODELS).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("flood", [b"x-trailer: " + b"a" * (1 << 20), b"5;x=" + b"a" * (1 << 20)])
def test_what_is_fed_without_end_after_the_headers_is_refused(launch: Callable[..., Running], flood: bytes) -> None:
    """A trailer field, or a chunk's extension, that never ends: the parser would keep all of the former."""
    server = launch()
    start = completion().replace(b"content-length: ", b"transfer-encoding: chunked\r\nx: ")
    head, _, body = start.partition(b"\r\n\r\n")
    chunks = b"%x\r\n%b\r\n" % (len(body) - 3, body[:-3]) + (b"0\r\n" if b"trailer" in flood else b"")
    with server.connect() as sock:
        try:
            sock.sendall(head + b"\r\n\r\n" + chunks)
            sock.sendall(flood)
            answer = sock.recv(4096)
        except OSError:
            answer = b"reset"
    assert answer == b"reset" or answer.startswith(b"HTTP/1.1 431")
    assert server.engine.submitted == []


@pytest.mark.parametrize(("count", "answered"), [(MAX_PIPELINED + 1, True), (2000, False)])
def test_few_requests_wait_for_the_answer_to_another(
    launch: Callable[..., Running], count: int, answered: bool
) -> None:
    """Each takes a hundred times the bytes that it was sent in."""
    server = launch()
    with server.connect() as sock:
        sock.sendall(MODELS * (count - 1) + MODELS.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        answers = b""
        try:
            while block := sock.recv(65536):
                answers += block
        except ConnectionResetError:
            pass  # what it was still sending met a closed connection
    assert (answers.count(b"HTTP/1.1 200") == count) == answered
    assert answered or answers.count(b"HTTP/1.1 200") <= 1


def completion() -> bytes:
    content = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d"
        b"\r\n\r\n%b" % (len(content), content)
    )


def ask(sock: socket.socket, content: bytes) -> bytes:
    sock.sendall(content)
    return sock.recv(4096)
