"""C33: an exception while one peer is handled ends the session with this peer, wherever it is raised."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.base.errors import WireError
from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.requests.transfers import Offered, Send, Tail
from forebay.transfer.session.connection import ConnectionLost, Guard
from forebay.transfer.session.peers import SessionWithDecode
from forebay.transfer.session.prefill import Shipments
from forebay.transfer.transports import shm
from forebay.transfer.transports.tcp import TcpReader, TcpWriter
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.memory import HostMemory, shapes_of
from tests.deadlines import wait_until
from tests.pools.caches import regions_of
from tests.transfer.ends import QUICK, N, assert_ends, code_of
from tests.transfer.pair import EVERYTHING, Half, half, offer, pair, spans_of, transfer


class Once:
    """Raises MemoryError in place of the first call that a test wants to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.right: Callable[..., Any] = getattr(owner, name)
        self.is_due = True
        once = self

        def call(*args: Any, **options: Any) -> Any:
            if once.is_due:
                once.is_due = False
                raise MemoryError("no room for what the peer wants")
            return once.right(*args, **options)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Shipments, "_offer"), (Shipments, "_depart"), (TcpWriter, "begin"), (TcpReader, "advance")],
    ids=["frame", "order", "write", "read"],
)
def test_guard_exception_for_one_peer_ends_its_session_and_another_is_served(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(EVERYTHING, backend="tcp") as (prefill, decode):
        other = half(DisaggregationMode.DECODE, EVERYTHING, backend="tcp")
        transfer(prefill, other, N)
        session = prefill.transfers._stage._sessions[other.transfers.instance]
        failing = Once(monkeypatch, owner, name)
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        if name != "_offer":
            prefill.wait(Offered, made.ticket)
            tail = Tail(num_tokens=N, token_id=1)
            prefill.transfers.submit(Send(ticket=made.ticket, spans=spans_of(prefill, N), tail=tail))
        assert code_of(decode, made.ticket) == "peer_lost"
        assert_ends(decode, made.ticket)
        assert not failing.is_due
        for one in (other, decode):  # the session of the other lives on; the first engine comes back with a new one
            transfer(prefill, one, N)
        assert prefill.transfers._stage._sessions[other.transfers.instance] is session
        other.transfers.close()


def test_guard_exception_in_a_tick_ends_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(backend="tcp") as (prefill, decode):
        transfer(prefill, decode, N)
        failing = Once(monkeypatch, SessionWithDecode, "tick")
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        assert code_of(decode, made.ticket) == "peer_lost"
        assert not failing.is_due
        assert prefill.transfers.num_rejected == 1
        transfer(prefill, decode, N)


# -- invitations of shared memory --------------------------------------------------------------------------------------


def join(prefill: Half, address: bytes) -> object:
    shapes = shapes_of(prefill.cache)
    memory, faults = HostMemory.of(prefill.cache, shapes), Faults(Chaos(), time.time)
    return shm.join(address, shapes, memory, page_size=4, timeout_s=5.0, faults=faults)


@pytest.mark.parametrize("name", [b"/run/docker.sock", b"\0other", b"\0forebay-" + b"0" * 31, b""])
def test_shm_invitation_to_another_socket_is_refused(name: bytes) -> None:
    """Prefill would send bytes of the peer's choice to any socket of the machine."""
    prefill = half(DisaggregationMode.PREFILL)
    with pytest.raises(WireError, match="names no socket"):
        join(prefill, msgspec.msgpack.encode((name, b"w" * shm.WORD_BYTES)))
    prefill.transfers.close()


def test_shm_file_that_its_owner_can_shrink_is_refused() -> None:
    """A write behind the end of a file is a SIGBUS, which ends prefill."""
    fd = os.memfd_create("caches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(WireError, match="can shrink"):
        HostMemory({}).map_file(fd, 4096)
    os.close(fd)


def test_shm_file_of_a_decode_engine_cannot_shrink() -> None:
    decode = half(DisaggregationMode.DECODE, backend="shm")
    fd, _ = decode.regions.place(next(iter(regions_of(decode.cache))).address)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    decode.transfers.close()


def test_shm_regions_outside_their_files_are_refused() -> None:
    """A view behind the end of a map is memory of something else."""
    prefill = half(DisaggregationMode.PREFILL)
    shapes = shapes_of(prefill.cache)
    kind = next(iter(shapes))
    place = shapes[kind].bytes_per_place[0]
    for file, offset, num_bytes in (
        (0, -1, place),
        (0, 0, -place),
        (0, 4096, place),
        (0, 4097 - place, place),
        (1, 0, place),
    ):
        with pytest.raises(WireError, match="not of this layout" if file else "of a file of 4096"):
            shm._regions(shm._Files([(kind, file, offset, num_bytes)]), [mmap.mmap(-1, 4096)], shapes, 4)
    with pytest.raises(WireError, match="regions"):
        shm._regions(shm._Files([]), [], shapes, 4)
    prefill.transfers.close()


def test_shm_reach_that_closes_lets_nobody_in() -> None:
    decode = half(DisaggregationMode.DECODE, backend="shm")
    reach = shm.ShmReach([*regions_of(decode.cache)], decode.regions.place, timeout_s=5.0)
    reach._is_closing = True
    with pytest.raises((WireError, OSError)):
        join(decode, reach.invitation)
    assert reach.writer_is_dead()
    reach.close()
    decode.transfers.close()


def test_shm_writer_is_dead_when_its_process_has_ended() -> None:
    decode = half(DisaggregationMode.DECODE, backend="shm")
    reach = shm.ShmReach([*regions_of(decode.cache)], decode.regions.place, timeout_s=5.0)
    join(decode, reach.invitation)
    assert not reach.writer_is_dead(), "it is this process"
    reach.close()
    assert not reach.writer_is_dead()
    decode.transfers.close()


NOBODY = msgspec.msgpack.encode((b"\0forebay-" + b"0" * 32, b"w" * shm.WORD_BYTES))


@pytest.mark.parametrize("address", [b"", b"\xff" * 100, NOBODY], ids=["empty", "junk", "nobody"])
def test_prefill_invitation_that_leads_nowhere_ends_the_session_only(address: bytes) -> None:
    with pair(backend="shm", options=QUICK) as (prefill, decode):
        transfer(prefill, decode, N)
        stranger = half(DisaggregationMode.DECODE, backend="shm", options=QUICK)
        stranger.transfers._engine.one_sided["shm"] = Inviting(address)
        stranger.transfers.submit(offer(prefill, stranger, spans_of(stranger, N), N))
        epochs = prefill.transfers._stage._epochs
        wait_until(lambda: epochs.get(stranger.transfers.instance, 0) > 1)  # its first session is over
        stranger.transfers.close()
        transfer(prefill, decode, N)


class Inviting:
    """One-sided transport of a peer that sends any address."""

    def __init__(self, address: bytes) -> None:
        self.invitation = address

    def reach(self, pid: int) -> Inviting:
        return self

    def join(self, address: bytes, page_size: int) -> Any:
        raise NotImplementedError

    def writer_is_dead(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_c33_process_of_another_user_is_not_let_into_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    reach: Any = object.__new__(shm.ShmReach)
    reach._word, reach._process = bytes(shm.WORD_BYTES), -1
    user = os.getuid()
    monkeypatch.setattr(shm.os, "getuid", lambda: user + 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"no word")
        with pytest.raises(WireError, match=f"of user {user} asked"):
            reach._admit(ours)


def test_c33_process_that_does_not_know_the_word_is_not_let_into_the_caches() -> None:
    reach: Any = object.__new__(shm.ShmReach)
    reach._word, reach._process = bytes(shm.WORD_BYTES), -1
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"w" * shm.WORD_BYTES)
        theirs.shutdown(socket.SHUT_WR)  # or whoever lets it in waits for its answer
        with pytest.raises(WireError, match="does not know the word"):
            reach._admit(ours)


@pytest.mark.parametrize(
    ("error", "count"),
    [(ConnectionLost("gone"), 0), (OSError("gone"), 0), (WireError("no frame"), 1), (MemoryError(), 1)],
)
def test_guard_counts_sessions_that_messages_ended_and_not_the_network(error: Exception, count: int) -> None:
    guard = Guard()
    guard.reason("there", error)
    assert guard.num_rejected == count
