"""The thread that moves chunks: what it waits for, closes, and says of places (C22)."""

from __future__ import annotations

import selectors
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.requests.pieces import Piece
from forebay.transfer.session import data_thread
from forebay.transfer.session.data_thread import DataThread, Sender
from forebay.transfer.state.tickets import Arrival
from tests.deadlines import wait_until

NONCE = bytes(16)
PIECE = Piece("state", 0, 1, 0, 1, np.array([1]))


class End:
    """A writer or reader over one end of a connection."""

    closes_at_once, holds_places, is_lost = True, True, False

    def __init__(self, sock: socket.socket, comes: tuple[object, ...] = ()) -> None:
        self.sock, self.comes, self.is_closed = sock, [*comes], False

    def begin(self, *chunk: object) -> None: ...

    def advance(self, *target: object) -> object:
        return self.comes.pop(0)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.is_closed = True


def test_c22_sender_waits_for_a_connection_that_takes_no_more() -> None:
    here, there = socket.socketpair()
    writer: Any = End(here, (None, "chunk"))
    with here, there, selectors.DefaultSelector() as selector:
        sender = Sender(selector, lambda report: None)
        sender.add(1, writer)
        sender.put(data_thread.Write(1, NONCE, [PIECE], [PIECE.places]))
        assert not sender.write(1)
        assert here.fileno() in selector.get_map()
        assert sender.write(1)
        assert here.fileno() not in selector.get_map()


@pytest.mark.parametrize("is_lost", [False, True])
def test_c22_sender_says_nothing_of_places_that_a_lost_writer_may_still_touch(is_lost: bool) -> None:
    reports: list[object] = []
    here, there = socket.socketpair()
    writer: Any = End(here, (None,))
    with here, there, selectors.DefaultSelector() as selector:
        sender = Sender(selector, reports.append)
        sender.add(1, writer)
        sender.put(data_thread.Write(1, NONCE, [PIECE], [PIECE.places]))
        sender.write(1)
        sender.drop(NONCE)
        assert reports == []
        writer.is_lost = is_lost
        sender.end(1)
        sender.drop(NONCE)
    assert (reports == []) is is_lost


def test_data_thread_closes_the_connections_that_it_reads_when_it_ends() -> None:
    here, there = socket.socketpair()
    memory: Any = SimpleNamespace(staging=lambda num_bytes: np.zeros(num_bytes, dtype=np.uint8))
    reader: Any = End(here)
    with here, there:
        moves = DataThread(memory, 8, lambda report: None)
        moves.submit(data_thread.AddReader(1, reader))
        wait_until(lambda: 1 in moves.receiver.readers)
        moves.close()
    assert reader.is_closed


def test_arrival_rate_counts_what_comes_behind_its_first_chunk() -> None:
    landing: Any = None
    arrival = Arrival(landing)
    for now, num_bytes in enumerate((100, 20, 3), start=1):
        arrival.add(num_bytes, float(now))
    assert arrival.num_bytes == 23
    assert arrival.bytes_per_s(3.0) == 11.5
