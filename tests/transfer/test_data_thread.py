"""The thread that moves chunks: what it waits for, closes, and says of places (C22)."""

from __future__ import annotations

import selectors
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.transfer.session import data_thread
from forebay.transfer.session.data_thread import DataThread, _Arrival, _Outbox
from tests.deadlines import wait_until

NONCE = bytes(16)


class End:
    """A writer or reader over one end of a connection."""

    closes_at_once, holds_places, is_lost = True, True, False

    def __init__(self, sock: socket.socket, comes: tuple[object, ...] = ()) -> None:
        self.sock, self.comes, self.is_closed = sock, [*comes], False

    def advance(self, *target: object) -> object:
        return self.comes.pop(0)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.is_closed = True


class Still:
    """Enough of a mover that has no thread."""

    _drop, _let_go, _watch, _write = DataThread._drop, DataThread._let_go, DataThread._watch, DataThread._write

    def __init__(self) -> None:
        self.reports: list[object] = []
        self._report = self.reports.append
        self._selector = selectors.DefaultSelector()
        self._dropping, self._lost = {NONCE}, set[bytes]()
        self._arrivals: dict[bytes, object] = {}
        self._outboxes: dict[int, object] = {}
        self._readers: dict[int, object] = {}
        self._ending_boxes: list[object] = []


def test_c22_mover_waits_for_a_connection_that_takes_no_more() -> None:
    here, there = socket.socketpair()
    moves: Any = Still()
    writer: Any = End(here, (None, "chunk"))
    box = _Outbox(writer, current=bytes(1))
    with here, there, moves._selector:
        assert not moves._write(1, box)
        assert here.fileno() in moves._selector.get_map()
        assert moves._write(1, box)
        assert here.fileno() not in moves._selector.get_map()


@pytest.mark.parametrize("is_lost", [False, True])
def test_c22_mover_says_nothing_of_places_that_a_lost_writer_may_still_touch(is_lost: bool) -> None:
    moves: Any = Still()
    writer: Any = SimpleNamespace(is_lost=is_lost)
    moves._let_go(_Outbox(writer, current=NONCE))
    moves._drop(NONCE)
    moves._selector.close()
    assert (moves.reports == []) is is_lost


def test_mover_closes_the_connections_that_it_reads_when_it_ends() -> None:
    here, there = socket.socketpair()
    memory: Any = SimpleNamespace(staging=lambda num_bytes: np.zeros(num_bytes, dtype=np.uint8))
    reader: Any = End(here)
    with here, there:
        moves = DataThread(memory, 8, lambda report: None)
        moves.submit(data_thread.AddReader(1, reader))
        wait_until(lambda: 1 in moves._readers)
        moves.close()
    assert reader.is_closed


def test_mover_rate_of_an_arrival_counts_what_comes_behind_its_first_chunk() -> None:
    landing: Any = None
    arrival = _Arrival(landing)
    for num_bytes in (100, 20, 3):
        arrival.add(num_bytes)
    assert arrival.num_bytes == 23
