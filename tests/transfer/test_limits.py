"""Limits, times and words of transfers at their values, and each log event of a connection (C22, C33)."""

from __future__ import annotations

import logging
import os
import re
import selectors
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.base.clock import TICK_S
from forebay.base.errors import ConfigError, WireError
from forebay.config.engine_config import Chaos, DisaggregationMode, DisaggregationOptions
from forebay.requests.pieces import KindShape, Piece
from forebay.requests.updates import Failure
from forebay.transfer import pattern, worker
from forebay.transfer.session import connection, data_thread, decode, peers, prefill
from forebay.transfer.session.connection import Connection, ConnectionLost, LocalEngine, tune
from forebay.transfer.session.data_thread import DataThread, Sender
from forebay.transfer.transports import shm, tcp
from forebay.transfer.wire import by_address, frames, framing, memory
from forebay.transfer.wire.by_address import ReachByAddress, shapes_there
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.framing import FrameDecoder, FrameEncoder
from forebay.transfer.wire.machine import machine
from forebay.transfer.wire.memory import HostMemory
from tests.deadlines import wait_until
from tests.pools.caches import regions_of
from tests.transfer.pair import half
from tests.transfer.test_bounds import BOUNDS, LAYOUT, LOGPROB, NONCE, OFFERING, TAIL
from tests.transfer.test_data_thread import PIECE, End

KIB, MIB = 1024, 1024**2


def test_limits_of_a_session_have_their_values() -> None:
    assert (framing.MAX_FRAME_BYTES, framing.MAX_GREETING_BYTES, framing.MAX_FIRST_BYTES) == (
        64 * MIB,
        4 * KIB,
        4 * MIB,
    )
    assert framing.PREFIX_BYTES == 4 + 4 + 8 + 32
    assert (connection.RECEIVE_BYTES, connection.MAX_UNSENT_BYTES, tcp.BUFFER_BYTES) == (256 * KIB, 128 * MIB, 4 * MIB)
    assert (prefill.MAX_STRANGERS, prefill.MAX_SESSIONS, prefill.MAX_KNOWN) == (64, 1024, 4096)
    assert (tcp.MAX_PARTS, memory.RUN_BYTES, pattern.MAX_REPORTED) == (64, 4 * KIB, 8)
    assert (shm.WORD_BYTES, shm.MAX_FILES, shm._MESSAGE_BYTES) == (32, 250, MIB)
    assert (frames.MAX_TICKETS, frames.MAX_COLUMNS, frames.MAX_KINDS) == (65_536, 65_536, 16)
    assert (frames.MAX_CODE_CHARS, frames.MAX_MESSAGE_CHARS, frames.NONCE_BYTES) == (64, 65_536, 32)
    assert peers.UNLIMITED == 2**31


def test_times_of_a_session_are_parts_of_a_heartbeat() -> None:
    assert (connection.MISSED_BEATS, worker.TICKS_PER_BEAT, decode.RETRIES_PER_BEAT) == (3, 4, 4)
    assert (connection.HOLD_S, data_thread.POLL_S) == (0.005, 0.0005)
    options = DisaggregationOptions(heartbeat_s=2.5)
    engine = LocalEngine(
        options=options,
        instance="",
        layout=LAYOUT,
        shapes={},
        memory=None,  # type: ignore[arg-type]
        transports=[],
        one_sided={},
        machine="",
    )
    assert engine.silence_s == 7.5


@pytest.mark.parametrize(("heartbeat_s", "period_s"), [(0.02, 0.005), (4 * TICK_S, TICK_S), (60.0, TICK_S)])
def test_worker_looks_at_its_sessions_four_times_a_beat_and_each_tick_at_least(
    heartbeat_s: float, period_s: float
) -> None:
    made = half(DisaggregationMode.DECODE, backend="tcp", options=DisaggregationOptions(heartbeat_s=heartbeat_s))
    assert made.transfers._period_s == period_s
    made.transfers.close()


def test_prefill_listens_where_it_is_told_with_room_for_64_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def create_server(address: tuple[str, int], backlog: int) -> Any:
        asked.append((address, backlog))
        return SimpleNamespace(setblocking=asked.append)

    monkeypatch.setattr(socket, "create_server", create_server)
    worker._listen(DisaggregationOptions(host="127.0.0.9", bootstrap_port=7))
    assert asked == [(("127.0.0.9", 7), 64), False]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"host": "10.0.0.1"}, ""),
        ({"chaos": Chaos(drop=0.1)}, ""),
        ({"chaos": Chaos(drop=0.1), "host": "10.0.0.1"}, "--chaos with servers on 10.0.0.1"),
        ({"mode": DisaggregationMode.PREFILL}, ""),
        ({"mode": DisaggregationMode.PREFILL, "host": "10.0.0.1"}, "prefill would accept every peer on 10.0.0.1"),
        ({"mode": DisaggregationMode.DECODE, "host": "10.0.0.1"}, ""),
        ({"mode": DisaggregationMode.PREFILL, "host": "10.0.0.1", "cluster_key": b"key"}, ""),
    ],
)
def test_options_that_let_strangers_or_faults_in_are_refused(changes: dict[str, Any], why: str) -> None:
    options = DisaggregationOptions(**changes)
    if not why:
        worker._check(options)
        return
    with pytest.raises(ConfigError, match=why):
        worker._check(options)


def test_tune_sets_no_waiting_no_delay_and_buffers_of_4_mebibytes() -> None:
    calls: list[tuple[object, ...]] = []
    sock: Any = SimpleNamespace(
        setblocking=lambda flag: calls.append((flag,)), setsockopt=lambda *option: calls.append(option)
    )
    tune(sock)
    assert calls == [
        (False,),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB),
    ]


@pytest.mark.parametrize("over", [0, 1])
def test_connection_holds_unsent_bytes_up_to_its_limit(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 100)

    def send(data: bytearray) -> int:
        raise BlockingIOError

    sock: Any = SimpleNamespace(send=send)
    link = Connection(sock, "peer", lambda: 0.0, Chaos())
    link._unsent += bytes(100 + over)
    if not over:
        link.flush()
        assert link.wants_to_write
        return
    with pytest.raises(ConnectionLost, match="it left 101 bytes unread"):
        link.flush()


def test_connection_says_why_it_is_lost() -> None:
    def broken(data: object) -> int:
        raise OSError("no route")

    lost: Any = Connection(SimpleNamespace(send=broken, recv=broken), "peer", lambda: 0.0, Chaos())  # type: ignore[arg-type]
    lost._unsent += b"x"
    with pytest.raises(ConnectionLost, match="no route"):
        lost.flush()
    with pytest.raises(ConnectionLost, match="no route"):
        next(lost.receive())
    ended: Any = Connection(SimpleNamespace(recv=lambda size: b""), "peer", lambda: 0.0, Chaos())  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost, match="end of file"):
        next(ended.receive())


@pytest.mark.parametrize("over", [0, 1])
def test_c33_frame_has_at_most_so_many_bytes(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = frames.Invite(bytes(100))
    size = len(msgspec.msgpack.encode(frame))
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", size - over)
    encoder = FrameEncoder(b"key", 3)
    if over:
        with pytest.raises(WireError, match=r"a Invite frame of .* is over the cap of"):
            encoder.encode(frame)
        return
    data = encoder.encode(frame)
    assert len(data) == 48 + size
    decoder = FrameDecoder(frames.ToPrefill, b"key", 3, cap=size)
    decoder.feed(data[:47])
    assert decoder.missing() == 1
    decoder.feed(data[47:])
    assert decoder.take() == frame
    small = FrameDecoder(frames.ToPrefill, b"key", 3, cap=size - 1)
    small.feed(data)
    with pytest.raises(WireError, match=f"announced a frame of {size} bytes; the cap is {size - 1}"):
        small.take()


def test_c33_frame_that_is_none_is_refused_in_200_characters() -> None:
    class Long(msgspec.Struct, tag="x" * 500):
        pass

    decoder = FrameDecoder(frames.ToPrefill, b"key", 1)
    decoder.feed(FrameEncoder(b"key", 1).encode(Long()))
    with pytest.raises(WireError) as refused:
        decoder.take()
    assert len(str(refused.value).partition(": ")[2]) == 200
    assert str(refused.value).startswith("frame 0 is none of the expected types: ")


# Bounds that follow from the caches and the vocabulary: 100 tokens, and a prompt of 45.


@pytest.mark.parametrize(
    ("place", "low", "high"),
    [
        ("num_tokens", 1, 2**31 - 1),
        ("token_id", 0, 99),
        ("differs_at", -1, 45),
        ("token_here", -1, 99),
        ("token_there", -1, 99),
        ("cached_tokens", 0, 45),
        ("kv_tokens", 0, 45),
        ("resumable", 0, 45),
        ("tiers", 0, 45),
        ("rank", 0, 100),
        ("logprob token_id", 0, 99),
        ("top_ids", 0, 99),
    ],
)
def test_c33_number_of_a_tail_is_accepted_at_both_bounds_and_not_beyond(place: str, low: int, high: int) -> None:
    def tail(value: int) -> frames.Completed:
        changed = msgspec.structs.replace
        match place:
            case "num_tokens" | "token_id":
                made = changed(TAIL, **{place: value})
            case "resumable" | "tiers":
                made = changed(TAIL, cache=changed(TAIL.cache, **{place: {"state": value}}))
            case "rank":
                made = changed(TAIL, logprob=changed(LOGPROB, rank=value))
            case "logprob token_id":
                made = changed(TAIL, prompt_logprobs=[changed(LOGPROB, token_id=value)])
            case "top_ids":
                made = changed(TAIL, logprob=changed(LOGPROB, top_ids=[value]))
            case _:
                made = changed(TAIL, cache=changed(TAIL.cache, **{place: value}))
        return frames.Completed(NONCE, made)

    for value in (low, high):
        BOUNDS.check(tail(value))
    for value in (low - 1, high + 1):
        with pytest.raises(WireError, match=rf"out of bounds: {value}; {low} to {high} are possible here"):
            BOUNDS.check(tail(value))


@pytest.mark.parametrize("count", [16, 17])
@pytest.mark.parametrize("field", ["resumable", "tiers"])
def test_c33_report_names_at_most_16_kinds_and_tiers(field: str, count: int) -> None:
    report = msgspec.structs.replace(TAIL.cache, **{field: dict.fromkeys(map(str, range(count)), 1)})
    frame = frames.Completed(NONCE, msgspec.structs.replace(TAIL, cache=report))
    if count == 16:
        BOUNDS.check(frame)
        return
    with pytest.raises(WireError, match=field):
        BOUNDS.check(frame)


@pytest.mark.parametrize(
    "logprob", [float("nan"), float("inf"), float("-inf"), -3.0], ids=["nan", "inf", "-inf", "number"]
)
def test_c33_log_probability_is_a_number_or_negative_infinity(logprob: float) -> None:
    made = [
        msgspec.structs.replace(LOGPROB, logprob=logprob),
        msgspec.structs.replace(LOGPROB, top_logprobs=[logprob]),
    ]
    for entry in made:
        frame = frames.Completed(NONCE, msgspec.structs.replace(TAIL, logprob=entry))
        if logprob < 0:
            BOUNDS.check(frame)
            continue
        with pytest.raises(WireError, match="not a number or positive infinity"):
            BOUNDS.check(frame)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"start": 8}, True),
        ({"start": 9}, False),
        ({"places": {"kv": frames.Places(9, bytes(9 * 8))}}, True),
        ({"places": {"kv": frames.Places(10, b"")}}, False),
        ({"places": {"kv": frames.Places(0, bytes(10 * 8))}}, False),
        ({"places": {"state": frames.Places(0, bytes(8))}}, True),
        ({"places": {"state": frames.Places(0, bytes(16))}}, False),
        ({"places": {"state": frames.Places(1, bytes(8))}}, False),
        ({"places": {"unknown": frames.Places(9, bytes(72))}}, True),  # the offer alone is refused
    ],
)
def test_c33_offer_of_9_tokens_has_places_for_as_many(changes: dict[str, Any], accepted: bool) -> None:
    frame = msgspec.structs.replace(OFFERING, **changes)
    if accepted:
        BOUNDS.check(frame)
        return
    with pytest.raises(WireError):
        BOUNDS.check(frame)


@pytest.mark.parametrize(
    ("failure", "accepted"),
    [
        (Failure("K" * 64, "c" * 64, "m" * 65_536), True),
        (Failure("K_1", "a_b", "", "a_field"), True),
        (Failure("K" * 65, "c", ""), False),
        (Failure("K", "c" * 65, ""), False),
        (Failure("K", "", ""), False),
        (Failure("", "c", ""), False),
        (Failure("K", "c", "m" * 65_537), False),
        (Failure("K", "\u00e9", ""), False),
        (Failure("a-b", "c", ""), False),
        (Failure("K", "c", "", ""), False),
        (Failure("K", "c", "", "p" * 65), False),
        (Failure("K", "c", "", "a field"), False),
    ],
)
def test_c33_failure_of_a_peer_has_short_words_and_a_message(failure: Failure, accepted: bool) -> None:
    declined = frames.Declined(NONCE, 1, 1, b"", failure)
    for frame in (declined, frames.Refused(failure), frames.Withdrawn(NONCE, failure)):
        if accepted:
            BOUNDS.check(frame)
            continue
        with pytest.raises(WireError):
            BOUNDS.check(frame)


@pytest.mark.parametrize(
    ("failure", "kind", "code", "said"),
    [
        (frames.bootstrap_timeout("h:1", 1.5), "RequestTimeout", "bootstrap_timeout", "at h:1 within 1.5 s"),
        (frames.heartbeat_timeout("h", 6.0), "RequestTimeout", "heartbeat_timeout", "h has not been heard of for 6 s"),
        (frames.lease_timeout("h", 30.0), "RequestTimeout", "lease_timeout", "h has not gone on for 30 s"),
        (frames.peer_lost("h", "why"), "Unavailable", "peer_lost", "the connection to h has ended: why"),
        (frames.peer_rejected("h", KeyError()), "Unavailable", "peer_rejected", "KeyError while a message of h"),
        (frames.peer_asleep("h"), "Unavailable", "peer_asleep", "the prefill server at h is asleep: send it again"),
        (frames.layout_mismatch("x"), "Unavailable", "layout_mismatch", "do not fit together: x"),
        (frames.no_transport(["a"], ["b"]), "Unavailable", "transfer_backend_mismatch", r"has \['a'\], decode \['b'\]"),
        (frames.key_required("h"), "Unavailable", "cluster_key", "h is not this machine"),
    ],
)
def test_failures_have_their_codes_and_name_the_peer(failure: Failure, kind: str, code: str, said: str) -> None:
    assert (failure.kind, failure.code) == (kind, code)
    assert re.search(said, failure.message)


@pytest.mark.parametrize(("prefill", "decode", "fits"), [(4, 4, 1), (4, 16, 1), (16, 4, 1), (4, 6, 0), (6, 4, 0)])
def test_c31_layouts_fit_if_one_page_size_divides_the_other(prefill: int, decode: int, fits: bool) -> None:
    ours, theirs = (msgspec.structs.replace(LAYOUT, page_size=size) for size in (prefill, decode))
    assert ours.digest == theirs.digest
    said = f"page_size: prefill has {prefill}, decode {decode}, and neither divides the other"
    assert frames.mismatch(ours, theirs) == ("" if fits else said)


# The machine, and faults on purpose.


def fake_proc(folder: Path) -> Path:
    (folder / "self" / "ns").mkdir(parents=True)
    for name in ("pid", "net", "mnt"):
        (folder / "self" / "ns" / name).symlink_to(f"{name}:[1]")
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text("boot\n")
    return folder


def test_machine_is_its_boot_the_user_and_the_namespaces_of_processes_and_networks(tmp_path: Path) -> None:
    assert machine(fake_proc(tmp_path / "proc")) == f"boot:{os.getuid()}:pid:[1]:net:[1]"


def test_machine_without_proc_is_no_other_and_not_itself(tmp_path: Path) -> None:
    found = [machine(tmp_path) for _ in range(2)]
    assert found[0] != found[1]
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in found)


def message(text: bytes) -> list[memoryview]:
    return [memoryview(text[:2]), memoryview(text[2:])]


def left(faults: Faults, text: bytes) -> list[bytes]:
    return [b"".join(each) for each in faults.spoil(message(text))]


def test_faults_none_pass_each_message_unchanged() -> None:
    faults = Faults(Chaos(), lambda: 0.0)
    assert left(faults, b"abcd") == [b"abcd"]
    assert not faults.loses()
    assert not faults.alters()


def test_faults_certain_ones_drop_double_and_reorder() -> None:
    assert left(Faults(Chaos(drop=1.0), lambda: 0.0), b"abcd") == []
    assert left(Faults(Chaos(double=1.0), lambda: 0.0), b"abcd") == [b"abcd", b"abcd"]
    late = Faults(Chaos(reorder=1.0), lambda: 0.0)
    assert [left(late, text) for text in (b"one.", b"two.", b"three", b"four")] == [
        [], [b"two.", b"one."], [], [b"four", b"three"],
    ]  # fmt: skip


def test_faults_alter_one_bit_of_a_message() -> None:
    faults = Faults(Chaos(alter=1.0), lambda: 0.0)
    for _ in range(50):
        (altered,) = left(faults, b"abcd")
        assert sum((a ^ b).bit_count() for a, b in zip(altered, b"abcd", strict=True)) == 1


def test_faults_hold_a_message_for_its_delay() -> None:
    now = [10.0]
    faults = Faults(Chaos(delay_s=2.0), lambda: now[0])
    assert not faults.holds_back
    faults.put(b"a")
    assert faults.holds_back
    for now[0], due in ((11.9, []), (12.0, [b"a"]), (20.0, [])):
        assert [*faults.due()] == due
    assert not faults.holds_back


# Log events of connections.


def test_shm_writer_that_never_comes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = half(DisaggregationMode.DECODE, backend="shm")
    with caplog.at_level(logging.INFO, logger="forebay"):
        reach = shm.ShmReach([*regions_of(made.cache)], made.regions.place, timeout_s=0.01)
        wait_until(lambda: not reach._thread.is_alive())
    assert 'shm_nobody_came why="timed out"' in caplog.text
    assert reach._listener.gettimeout() == 0.01
    reach.close()
    assert reach.writer_is_dead()
    made.transfers.close()


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), WireError("no chunk"), KeyError("bug")])
def test_data_thread_connection_that_ends_is_logged_and_reported(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(End):
        def advance(self, *target: object) -> object:
            raise error

    reports: list[object] = []
    staging: Any = SimpleNamespace(staging=lambda num_bytes: np.zeros(num_bytes, dtype=np.uint8))
    here, there = socket.socketpair()
    with here, there, caplog.at_level(logging.INFO, logger="forebay"):
        moves = DataThread(staging, 8, reports.append)
        reader: Any = Broken(here)
        moves.submit(data_thread.AddReader(4, reader))
        there.send(b"x")
        wait_until(lambda: bool(reports))
        moves.close()
    assert reports == [data_thread.Lost(4, str(error))]
    assert "transfer_connection_ended" in caplog.text
    assert ("peer_failed" in caplog.text) is isinstance(error, KeyError)
    assert reader.is_closed


def test_c22_write_that_fails_behind_its_session_s_end_is_logged_and_closes_its_places(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(End):
        closes_at_once = False

        def advance(self, *target: object) -> object:
            if self.comes:
                return self.comes.pop(0)
            raise OSError("broken pipe")

    reports: list[object] = []
    here, there = socket.socketpair()
    writer: Any = Slow(here, (None, None))
    with here, there, selectors.DefaultSelector() as selector, caplog.at_level(logging.INFO, logger="forebay"):
        sender = Sender(selector, reports.append)
        sender.add(1, writer)
        sender.put(data_thread.Write(1, NONCE, [PIECE], [PIECE.places]))
        sender.write(1)
        sender.end(1)
        sender.drop(NONCE)
        sender.end_what_is_over()
        assert (reports, writer.is_closed) == ([], False)
        sender.end_what_is_over()
    assert reports == [data_thread.Dropped(NONCE)]
    assert writer.is_closed
    assert "transfer_connection_ended" in caplog.text
    assert "broken pipe" in caplog.text
    assert not sender.ending


# Memory by runs and by addresses.

SHAPES = {"kv": KindShape(by_token=True, page_size=4, num_ids=9, bytes_per_place=(8, 2))}


@pytest.mark.parametrize(
    ("regions", "num_ids"),
    [([("kv", 0, 320), ("kv", 0, 80)], 10), ([("kv", 0, 351), ("kv", 0, 64)], 8), ([("kv", 0, 31), ("kv", 0, 80)], 0)],
)
def test_shapes_there_have_as_many_pages_as_the_smallest_region(
    regions: list[tuple[str, int, int]], num_ids: int
) -> None:
    (shape,) = shapes_there(regions, SHAPES, 4).values()
    assert (shape.num_ids, shape.page_size, shape.bytes_per_place) == (num_ids, 4, (8, 2))


@pytest.mark.parametrize("regions", [[], [("kv", 0, 64)], [("kv", 0, 64)] * 3, [("state", 0, 64), ("kv", 0, 64)]])
def test_c33_regions_of_another_layout_are_refused(regions: list[tuple[str, int, int]]) -> None:
    with pytest.raises(WireError, match="region"):
        shapes_there(regions, SHAPES, 4)


def test_writer_of_another_machine_is_never_known_to_be_dead() -> None:
    reach = ReachByAddress(b"invitation", 0)
    assert (reach.invitation, reach.writer_is_dead()) == (b"invitation", False)
    own = ReachByAddress(b"", os.getpid())
    assert not own.writer_is_dead()


@pytest.mark.parametrize(("descriptor", "known"), [(-1, False), (0, True), (7, True)])
def test_writer_of_this_machine_is_dead_when_its_process_has_ended(
    descriptor: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any descriptor may be that of a process, 0 too, if the standard input is closed."""
    closed: list[int] = []
    monkeypatch.setattr(by_address, "process_has_ended", lambda process: process == descriptor)
    monkeypatch.setattr(by_address.os, "close", closed.append)
    reach = ReachByAddress(b"", 0)
    reach._process = descriptor
    assert reach.writer_is_dead() is known
    reach.__del__()
    assert closed == [descriptor] * known
    reach._process = -1


@pytest.mark.parametrize(("size", "in_runs"), [(4096, True), (4095, False)])
def test_memory_runs_of_4_kibibytes_are_copied_by_themselves(size: int, in_runs: bool) -> None:
    region = np.zeros(9 * size, dtype=np.uint8).view(np.dtype(f"V{size}"))
    piece = Piece("kv", 0, 1, 0, 2, np.array([3, 5]))
    assert len(HostMemory({"kv": [region]}).parts(piece)) == 2 * in_runs
