"""What comes over a connection in parts: whose places it goes to, and when its sender was heard (C22)."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.base.errors import WireError
from forebay.config.engine_config import Chaos
from forebay.requests.pieces import Chunk, Piece, chunk_of
from forebay.transfer.session.connection import Connection
from forebay.transfer.transports.tcp import TcpReader
from forebay.transfer.wire.frames import Beat, ToDecode
from forebay.transfer.wire.framing import FrameDecoder, FrameEncoder
from forebay.transfer.wire.memory import checksum
from tests.transfer.pair import KEY

MINE, ANOTHER = b"m" * 16, b"a" * 16
DATA = bytes(range(64))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("given_up", [MINE, ANOTHER])
def test_c22_chunk_under_way_goes_on_when_another_ticket_is_given_up(
    ends: tuple[socket.socket, socket.socket], given_up: bytes
) -> None:
    here, there = ends
    places, staging = bytearray(len(DATA)), np.zeros(len(DATA), dtype=np.uint8)
    reader = TcpReader(here, FrameDecoder(Chunk, KEY, 1), staging)
    target = lambda chunk: [memoryview(places)]  # noqa: E731
    piece = Piece("kv", 0, 1, 0, 1, np.array([1]))
    there.sendall(FrameEncoder(KEY, 1).encode(chunk_of(MINE, piece, len(DATA), checksum(DATA))) + DATA[:20])
    while places[19] == 0:
        assert reader.advance(target) is None
    reader.divert(given_up)
    there.sendall(DATA[20:])
    while (come := reader.advance(target)) is None:
        pass
    _, found, staged = come
    assert found == checksum(DATA)
    assert (staged is None) == (given_up == ANOTHER)
    assert bytes(places) == (DATA if given_up == ANOTHER else DATA[:20] + bytes(44))


def test_c22_chunk_that_ends_with_its_connection_never_comes(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    reader = TcpReader(here, FrameDecoder(Chunk, KEY, 1), np.zeros(len(DATA), dtype=np.uint8))
    piece = Piece("kv", 0, 1, 0, 1, np.array([1]))
    there.sendall(FrameEncoder(KEY, 1).encode(chunk_of(MINE, piece, len(DATA), checksum(DATA))) + DATA[:20])
    there.close()
    with pytest.raises(ConnectionResetError, match="end of file"):
        reader.advance(lambda chunk: [])


def test_c33_chunk_that_has_no_room_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    reader = TcpReader(here, FrameDecoder(Chunk, KEY, 1), np.zeros(len(DATA), dtype=np.uint8))
    there.sendall(FrameEncoder(KEY, 1).encode(chunk_of(MINE, Piece("kv", 0, 1, 0, 1, np.array([1])), len(DATA) + 1, 0)))
    with pytest.raises(WireError, match="no chunk of up to 64 bytes"):
        reader.advance(lambda chunk: [])


def test_c22_peer_is_heard_when_what_it_says_is_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    now = 0.0
    link, said = Connection(here, "there", lambda: now, Chaos()), FrameEncoder(KEY, 1).encode(Beat())
    link.decoder = FrameDecoder(ToDecode, KEY, 1)
    now = 5.0
    there.sendall(said[:-1])
    assert (list(link.receive()), link.last_received_at) == ([], 0.0)
    now = 6.0
    there.sendall(said[-1:])
    assert (list(link.receive()), link.last_received_at) == ([Beat()], 6.0)
