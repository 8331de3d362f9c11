"""C22: whatever a peer does, a ticket ends once, its places are closed when nobody can touch them, and others go on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from forebay.base.errors import ConfigError
from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.disagg import dial, frames, layout, link, memory, pages, shm, tcp
from forebay.disagg.faults import Faults
from forebay.disagg.link import LinkLost
from forebay.disagg.memory import HostMemory
from forebay.disagg.shm import ShmWriter
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Event,
    Offer,
    Offered,
    Renewed,
    Send,
    Sent,
    Span,
    Tail,
    Ticket,
    Withdraw,
)
from forebay.requests.updates import Failure
from tests.deadlines import NEVER_S, wait_until
from tests.disagg.pair import (
    BACKENDS,
    EVERYTHING,
    OPTIONS,
    PLAIN,
    Half,
    half,
    layout_of,
    offer,
    pair,
    spans_of,
    transfer,
)
from tests.disagg.scripted import Peer, ScriptedPrefill, hello, scripted_decode

# Silence is found after three beats: soon, and not before a busy machine has come round to whoever is silent.
QUICK = replace(OPTIONS, heartbeat_s=0.3)
STEADY = replace(OPTIONS, heartbeat_s=1.0)
GONE = Failure("EngineError", "aborted", "the client went away")
N = 45


def code_of(half: Half, ticket: Ticket) -> str:
    broken = half.wait(Broken, ticket)
    assert isinstance(broken, Broken)
    return broken.failure.code


def assert_ends(half: Half, ticket: Ticket) -> None:
    """Once, and then for good."""
    half.wait(Closed, ticket)
    ends = [name for name in half.by_ticket[ticket.nonce] if name not in ("Offered", "Renewed")]
    assert ends[0] in ("Arrived", "Sent", "Broken")
    assert ends[1:] == ["Closed"]


@contextlib.contextmanager
def decode_alone(**others: object) -> Iterator[tuple[ScriptedPrefill, Half]]:
    """A decode engine with a peer that says what the test wants."""
    decode, peer = half(DisaggregationMode.DECODE, **others), ScriptedPrefill()  # type: ignore[arg-type]
    try:
        yield peer, decode
    finally:
        peer.close()
        decode.transfers.close()


def scripted_offer(peer: ScriptedPrefill, decode: Half) -> Offer:
    ticket = Ticket(decode.transfers.instance, 7, os.urandom(16))
    spans = spans_of(decode, N)
    made = Offer(ticket=ticket, host="127.0.0.1", port=peer.port, num_tokens=N, digest=b"", start=0, spans=spans)
    decode.transfers.submit(made)
    return made


# -- whoever withdraws, whenever ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("when", ["at once", "offered", "under way", "tail"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_of_either_side_at_any_time_reaches_the_other(backend: str, when: str, side: str) -> None:
    """G-2"""
    with pair(EVERYTHING, backend=backend) as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        who, order = prefill if side == "prefill" else decode, Withdraw(made.ticket, GONE)
        decode.transfers.submit(made)
        if when == "at once" and side == "decode":
            decode.transfers.submit(order)
            assert_ends(decode, made.ticket)
            return
        prefill.wait(Offered, made.ticket)
        ours = spans_of(prefill, N)
        if when == "under way":
            part = {"kv": Span(start=0, ids=ours["kv"].ids[:5])}
            prefill.transfers.submit(Send(ticket=made.ticket, spans=part))
        if when == "tail":
            prefill.transfers.submit(Send(ticket=made.ticket, spans=ours, tail=Tail(num_tokens=N, token_id=1)))
        who.transfers.submit(order)
        for half in (prefill, decode):
            assert_ends(half, made.ticket)
        if when != "tail":
            assert {code_of(half, made.ticket) for half in (prefill, decode)} == {"aborted"}
        assert decode.transfers.num_unfenced == 0
        transfer(prefill, decode, N)


@pytest.mark.parametrize(
    ("spans", "tail"),
    [
        ({"kv": slice(1, None)}, None),  # the first page is missing
        ({"kv": slice(0, 5)}, Tail(num_tokens=N, token_id=1)),  # the end is
        ({"kv": slice(None)}, Tail(num_tokens=N - 1, token_id=1)),  # another length
    ],
    ids=["gap", "end", "length"],
)
def test_less_than_all_is_never_completed(spans: dict[str, slice], tail: Tail | None) -> None:
    with pair() as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        prefill.wait(Offered, made.ticket)
        ids = spans_of(prefill, N)["kv"].ids
        sent = {"kv": Span(start=4 * (spans["kv"].start or 0), ids=ids[spans["kv"]])}
        prefill.transfers.submit(Send(ticket=made.ticket, spans=sent, tail=tail))
        assert {code_of(half, made.ticket) for half in (prefill, decode)} == {"transfer_incomplete"}
        for half in (prefill, decode):
            assert_ends(half, made.ticket)


# -- what is altered, early or late ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_an_altered_chunk_breaks_its_ticket_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G-5"""
    copy = HostMemory.copy
    with pair(backend=backend) as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(tcp, "sum_of", lambda parts: 1)
            patch.setattr(HostMemory, "copy", lambda *args: copy(*args) ^ 1)
            made = offer(prefill, decode, spans_of(decode, N), N)
            decode.transfers.submit(made)
            prefill.wait(Offered, made.ticket)
            whole = spans_of(prefill, N)
            prefill.transfers.submit(Send(ticket=made.ticket, spans=whole, tail=Tail(num_tokens=N, token_id=1)))
            assert {code_of(half, made.ticket) for half in (prefill, decode)} == {"checksum_mismatch"}
            for half in (prefill, decode):
                assert_ends(half, made.ticket)
        transfer(prefill, decode, N)


def test_a_tail_that_comes_before_the_last_chunk_is_not_the_end() -> None:
    source = half(DisaggregationMode.PREFILL)
    with decode_alone(backend="tcp") as (peer, decode):
        made = scripted_offer(peer, decode)
        peer.join(decode, layout_of(decode.cache), "tcp")
        peer.control.wait(frames.Offering)
        peer.control.send(frames.Completed(made.ticket.nonce, Tail(num_tokens=N, token_id=3)))
        peer.control.send(frames.Beat([made.ticket.nonce]))  # behind it: when this is there, that was
        decode.wait(Renewed, made.ticket)
        assert "Arrived" not in decode.by_ticket[made.ticket.nonce]
        ours = spans_of(source, N, seed=9)["kv"]
        for chunk in peer.chunks(source, made.ticket.nonce, ours, N):
            peer.send_chunk(*chunk)
        decode.wait(Closed, made.ticket)
        assert decode.by_ticket[made.ticket.nonce][1:] == ["Arrived", "Closed"]
        there, here = decode.bytes_of("kv", made.spans["kv"], 0, N), source.bytes_of("kv", ours, 0, N)
        assert all((a == b).all() for a, b in zip(there, here, strict=True))
    source.transfers.close()


def test_what_comes_for_a_closed_ticket_is_not_written() -> None:
    source = half(DisaggregationMode.PREFILL)
    with decode_alone(backend="tcp") as (peer, decode):
        made, second = scripted_offer(peer, decode), scripted_offer(peer, decode)
        peer.join(decode, layout_of(decode.cache), "tcp")
        peer.control.wait(frames.Offering)
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        decode.wait(Closed, made.ticket)
        before = decode.bytes_of("kv", made.spans["kv"], 0, N)
        for ticket in (made.ticket, second.ticket):  # the second shows when the first has been read
            chunk, data = peer.chunks(source, ticket.nonce, spans_of(source, N)["kv"], N)[0]
            bad = chunk if ticket is made.ticket else msgspec.structs.replace(chunk, checksum=chunk.checksum ^ 1)
            peer.send_chunk(bad, data)
        assert code_of(decode, second.ticket) == "checksum_mismatch"
        after = decode.bytes_of("kv", made.spans["kv"], 0, N)
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    source.transfers.close()


def test_the_rest_of_a_chunk_is_not_written_when_its_ticket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RUN_BYTES", 0)  # all goes straight to its place
    source = half(DisaggregationMode.PREFILL)
    with decode_alone(backend="tcp") as (peer, decode):
        made, second = scripted_offer(peer, decode), scripted_offer(peer, decode)
        peer.join(decode, layout_of(decode.cache), "tcp")
        peer.control.wait(frames.Offering)
        kv = made.spans["kv"]
        before = decode.bytes_of("kv", kv, 0, N)
        chunk, data = peer.chunks(source, made.ticket.nonce, spans_of(source, N)["kv"], N)[0]
        cut = len(data) // 3
        peer.send_chunk(chunk, data[:cut])
        wait_until(lambda: not same(before, decode.bytes_of("kv", kv, 0, N)))
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        decode.wait(Closed, made.ticket)
        before = decode.bytes_of("kv", kv, 0, N)
        peer.data.link.sock.sendall(data[cut:])
        late, data = peer.chunks(source, second.ticket.nonce, spans_of(source, N)["kv"], N)[0]
        peer.send_chunk(msgspec.structs.replace(late, first=1), data)  # never due: shows that the rest was read
        assert code_of(decode, second.ticket) == "transfer_incomplete"
        assert same(before, decode.bytes_of("kv", kv, 0, N))
    source.transfers.close()


def same(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(before, after, strict=True))


def test_chunks_of_an_earlier_session_are_not_taken() -> None:
    """A connection of chunks belongs to its epoch, and a greeting that was recorded leads nowhere."""
    with pair(backend="tcp") as (prefill, decode):
        transfer(prefill, decode, N)
        port, instance = prefill.transfers.port, "i" * 32
        control = scripted_decode(port, hello(instance, 5))
        introduction = frames.Introduce(layout=layout_of(decode.cache), transports=["tcp"], machine="")
        control.send(introduction)
        control.wait(frames.Welcome)
        late = scripted_decode(port, hello(instance, 4, data=True))
        late.send(frames.Attach())
        again = scripted_decode(port, hello(instance, 5))  # as long as that session lives, and afterwards
        again.send(introduction)
        for peer in (late, again):
            wait_until(lambda peer=peer: is_refused(peer))
        right = scripted_decode(port, hello(instance, 5, data=True))
        right.send(frames.Attach())
        control.wait(frames.Joined)
        for peer in (control, late, again, right):
            peer.close()


def is_refused(peer: Peer) -> bool:
    try:
        return bool([*peer.link.receive()]) and False
    except LinkLost:
        return True


@pytest.mark.parametrize("wrong", ["double", "unknown kind", "early", "not from decode"])
def test_a_decode_engine_that_says_what_is_not_due_is_dropped_and_no_other(wrong: str) -> None:
    """G-4, G-8"""
    with pair(backend="tcp") as (prefill, decode):
        peer = scripted_decode(prefill.transfers.port, hello("i" * 32, 1))
        offering = frames.Offering(nonce=b"n" * 16, room=1, num_tokens=3, digest=b"", start=0, places={})
        peer.send(frames.Introduce(layout=layout_of(decode.cache), transports=["tcp"], machine=""))
        peer.wait(frames.Welcome)
        if wrong == "early":
            peer.send(offering)
        elif wrong == "not from decode":
            peer.send(frames.Fenced(b"n"))
        else:
            data = scripted_decode(prefill.transfers.port, hello("i" * 32, 1, data=True))
            data.send(frames.Attach())
            peer.wait(frames.Joined)
            places = {"kv" if wrong == "double" else "other": frames.Places(0, np.arange(1, 2).tobytes())}
            one = frames.Offering(nonce=b"n" * 16, room=1, num_tokens=3, digest=b"", start=0, places=places)
            peer.send(one)
            if wrong == "unknown kind":
                assert peer.wait(frames.Withdrawn).failure.code == "invalid_offer"
            else:
                peer.send(one)
        if wrong != "unknown kind":
            wait_until(lambda: is_refused(peer))
        transfer(prefill, decode, N)
        peer.close()
        if wrong in ("double", "unknown kind"):
            data.close()


# -- who is not there, or is another -----------------------------------------------------------------------------------


def test_each_way_not_to_meet_has_its_code() -> None:
    with (
        pair(PLAIN, options=replace(STEADY, bootstrap_timeout_s=2.0)) as (prefill, decode),
        socket.create_server(("127.0.0.1", 0)) as silent,  # accepts, and never answers
    ):
        for made in [scripted_nowhere(decode, port) for port in (silent.getsockname()[1], nobody_listens())]:
            assert code_of(decode, made.ticket) == "bootstrap_timeout"
            assert_ends(decode, made.ticket)
        transfer(prefill, decode, N)


def nobody_listens() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def scripted_nowhere(decode: Half, port: int, host: str = "127.0.0.1") -> Offer:
    ticket = Ticket(decode.transfers.instance, 7, os.urandom(16))
    made = Offer(
        ticket=ticket, host=host, port=port, num_tokens=N, digest=b"", start=0, spans=spans_of(decode, N)
    )  # fmt: skip
    decode.transfers.submit(made)
    return made


def test_another_layout_or_backend_is_refused_with_both_values() -> None:
    """G-6"""
    prefill, patient = half(DisaggregationMode.PREFILL), replace(OPTIONS, bootstrap_timeout_s=NEVER_S)
    decodes = [
        half(DisaggregationMode.DECODE, options=patient, weights="other"),
        half(DisaggregationMode.DECODE, EVERYTHING, options=patient),
    ]
    for decode, words in zip(decodes, (["'w'", "'other'"], ["2 x 8", "2 x 5"]), strict=True):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        broken = decode.wait(Broken, made.ticket)
        assert isinstance(broken, Broken)
        assert (broken.failure.kind, broken.failure.code) == ("Unavailable", "layout_mismatch")
        assert all(word in broken.failure.message for word in words)
        assert_ends(decode, made.ticket)
        assert prefill.wait(Offered, made.ticket) == declined(made, broken.failure)
        other = offer(prefill, decode, {}, N)
        decode.transfers.submit(Decline(other.ticket, other.host, other.port, N, other.digest, GONE))
        assert prefill.wait(Offered, other.ticket) == declined(other, GONE)
        wait_until(lambda d=decode: not d.transfers._side._peers)  # nobody is called again
        decode.transfers.close()
    prefill.transfers.close()


def test_prefill_hears_of_an_offer_that_was_withdrawn_before_the_two_had_a_session() -> None:
    with decode_alone() as (peer, decode):
        made = scripted_offer(peer, decode)
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        assert_ends(decode, made.ticket)
        peer.join(decode, layout_of(decode.cache), "tcp")
        assert peer.control.wait(frames.Declined) == frames.Declined(made.ticket.nonce, 7, N, made.digest, GONE)


def declined(made: Offer, why: Failure) -> Offered:
    return Offered(made.ticket, N, made.digest, 0, declined=why)


@pytest.mark.parametrize("older", [dial, link], ids=["decode", "prefill"])
def test_another_protocol_is_refused_with_both_numbers(older: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "PROTOCOL", 0)
    numbers = (layout.PROTOCOL, 0) if older is dial else (0, layout.PROTOCOL)
    with pair(options=QUICK) as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        broken = decode.wait(Broken, made.ticket)
        assert isinstance(broken, Broken)
        assert broken.failure.code == "layout_mismatch"
        assert "protocol: prefill speaks {}, decode {}".format(*numbers) in broken.failure.message
        assert_ends(decode, made.ticket)


@pytest.mark.parametrize(("backend", "module"), [("nixl", "nixl_cu12._api"), ("mooncake", "mooncake.engine")])
def test_a_library_that_cannot_be_loaded_is_named(backend: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"forebay.disagg.{backend}", raising=False)
    with pytest.raises(
        ConfigError, match=rf"--disaggregation-transfer-backend {backend}: .*{module.partition('.')[0]}.* use pip"
    ):
        half(DisaggregationMode.PREFILL, backend=backend)


def test_without_the_key_nothing_is_said_and_without_any_no_other_machine_is_asked() -> None:
    prefill, keyless = half(DisaggregationMode.PREFILL), replace(OPTIONS, cluster_key=b"")
    wrong = replace(OPTIONS, cluster_key=b"another", bootstrap_timeout_s=0.5)
    stranger = half(DisaggregationMode.DECODE, options=wrong)
    made = offer(prefill, stranger, spans_of(stranger, N), N)
    stranger.transfers.submit(made)
    assert code_of(stranger, made.ticket) == "bootstrap_timeout"
    stranger.transfers.close()
    alone = half(DisaggregationMode.DECODE, options=keyless)
    away = scripted_nowhere(alone, 8998, "192.0.2.1")
    assert code_of(alone, away.ticket) == "cluster_key"
    alone.transfers.close()
    assert prefill.take_news() == []
    prefill.transfers.close()


def test_junk_on_the_port_harms_nobody() -> None:
    """G-8"""
    rng = np.random.default_rng(0)
    with pair(backend="tcp") as (prefill, decode):
        transfer(prefill, decode, N)
        socks = []
        for size in (0, 1, 48, 300, 5000, 200_000, *[48] * 80):
            sock = socket.create_connection(("127.0.0.1", prefill.transfers.port))
            with contextlib.suppress(OSError):
                sock.sendall(rng.bytes(size))
            socks.append(sock)
        transfer(prefill, decode, N)
        for sock in socks:
            sock.close()


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_restarted_engine_is_used_again(backend: str, who: str) -> None:
    with pair(backend=backend, options=STEADY) as (prefill, decode):
        transfer(prefill, decode, N)
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        prefill.wait(Offered, made.ticket)
        if who == "prefill":
            port = prefill.transfers.port
            prefill.transfers.close()
            assert code_of(decode, made.ticket) == "peer_lost"
            options = replace(STEADY, bootstrap_port=port)
            again = half(DisaggregationMode.PREFILL, backend=backend, options=options)
            prefill.transfers, prefill.cache, prefill.regions = again.transfers, again.cache, again.regions
        else:
            decode.transfers.close()
            assert code_of(prefill, made.ticket) == "peer_lost"
            assert_ends(prefill, made.ticket)
            again = half(DisaggregationMode.DECODE, backend=backend, options=STEADY)
            decode.transfers, decode.cache, decode.regions = again.transfers, again.cache, again.regions
        transfer(prefill, decode, N, seed=3)


def test_places_that_a_peer_writes_to_are_closed_by_its_own_word_alone() -> None:
    """Not by a time, not by a lost connection, and not by another process that has its port."""
    with decode_alone(backend="shm", options=STEADY) as (peer, decode):
        made = scripted_offer(peer, decode)
        peer.join(decode, layout_of(decode.cache), "shm")
        peer.control.wait(frames.Offering)
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        peer.control.wait(frames.Withdrawn)
        decode.wait(Broken, made.ticket)
        assert decode.transfers.num_unfenced == 1
        peer.control.close()
        peer.join(decode, layout_of(decode.cache), "shm", "a successor")
        peer.control.wait(frames.Withdrawn)
        other = scripted_offer(peer, decode)
        peer.control.send(frames.Fenced(made.ticket.nonce), frames.Withdrawn(other.ticket.nonce, GONE))
        decode.wait(Broken, other.ticket)
        assert decode.by_ticket[made.ticket.nonce] == ["Broken"]
        assert decode.transfers.num_unfenced == 2
        peer.control.send(frames.Fenced(other.ticket.nonce))
        assert_ends(decode, other.ticket)
        peer.control.close()
        peer.join(decode, layout_of(decode.cache), "shm")
        peer.control.wait(frames.Withdrawn)
        peer.control.send(frames.Fenced(made.ticket.nonce))
        assert_ends(decode, made.ticket)


class Lost(ShmWriter):
    """Begins to write, and never learns what became of it."""

    holds_places = True
    closes_at_once = False
    is_lost = True

    def advance(self) -> frames.Chunk | None:
        raise OSError("lost")


def test_a_write_of_which_nobody_knows_the_end_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side, while others go on."""
    with pair(backend="shm", options=QUICK) as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(shm, "ShmWriter", Lost)
            made = offer(prefill, decode, spans_of(decode, N), N)
            decode.transfers.submit(made)
            prefill.wait(Offered, made.ticket)
            whole = spans_of(prefill, N)
            prefill.transfers.submit(Send(ticket=made.ticket, spans=whole, tail=Tail(num_tokens=N, token_id=1)))
            assert {code_of(half, made.ticket) for half in (prefill, decode)} == {"peer_lost"}
        for _ in range(2):
            transfer(prefill, decode, N)
        for half in (prefill, decode):
            half.take_news()
            assert "Closed" not in half.by_ticket[made.ticket.nonce]
        assert decode.transfers.num_unfenced == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_on_purpose_end_every_ticket_rightly_or_with_a_reason(backend: str) -> None:
    chaos = Chaos(drop=0.04, double=0.04, reorder=0.04, alter=0.04, delay_s=0.001)
    options = replace(QUICK, chaos=chaos, bootstrap_timeout_s=1.0, lease_s=1.0)
    endings = set()
    with pair(backend=backend, options=options) as (prefill, decode):
        for i in range(15):
            theirs, ours = spans_of(decode, N, seed=i), spans_of(prefill, N, seed=99 + i)
            made = offer(prefill, decode, theirs, N)
            decode.transfers.submit(made)
            wait_until(lambda made=made: has_any(prefill, made, Offered) or has_any(decode, made, Broken))
            prefill.transfers.submit(Send(ticket=made.ticket, spans=ours, tail=Tail(num_tokens=N, token_id=1)))
            assert_ends(decode, made.ticket)
            endings.add(decode.by_ticket[made.ticket.nonce][-2])
            if "Arrived" in decode.by_ticket[made.ticket.nonce]:
                there, here = decode.bytes_of("kv", theirs["kv"], 0, N), prefill.bytes_of("kv", ours["kv"], 0, N)
                assert all((a == b).all() for a, b in zip(there, here, strict=True))
            if has_any(prefill, made, Offered):
                prefill.transfers.submit(Withdraw(made.ticket, GONE))
                assert_ends(prefill, made.ticket)
    assert endings == {"Arrived", "Broken"}


class Once:
    """Chance that strikes once, as far behind as it can."""

    def __init__(self) -> None:
        self._rolls = iter([0.0])

    def random(self) -> float:
        return next(self._rolls, 1.0)

    def randrange(self, stop: int) -> int:
        return stop - 1


@pytest.mark.parametrize(
    ("backend", "fault", "code"),
    [
        ("tcp", "drop", "peer_lost"),
        ("tcp", "double", "peer_lost"),
        ("tcp", "reorder", "peer_lost"),
        ("tcp", "alter", "checksum_mismatch"),
        ("shm", "drop", "checksum_mismatch"),
        ("shm", "alter", "checksum_mismatch"),
    ],
)
def test_one_chunk_that_is_lost_doubled_late_or_altered_is_found(
    backend: str, fault: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 1 << 10)
    with pair(backend=backend, options=QUICK) as (prefill, decode):
        transfer(prefill, decode, N)
        [box] = prefill.transfers._mover._outboxes.values()
        box.writer._faults = spoiled = Faults(Chaos(**{fault: 1.0}), lambda: 0.0)
        spoiled._random = Once()
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        prefill.wait(Offered, made.ticket)
        whole = spans_of(prefill, N)
        prefill.transfers.submit(Send(ticket=made.ticket, spans=whole, tail=Tail(num_tokens=N, token_id=1)))
        assert code_of(decode, made.ticket) == code
        for half in (prefill, decode):
            assert_ends(half, made.ticket)
        transfer(prefill, decode, N)


def has_any(half: Half, made: Offer, kind: type[Event]) -> bool:
    select.select([half.transfers], [], [], 0.01)
    half.take_news()
    return kind.__name__ in half.by_ticket.get(made.ticket.nonce, ())


# -- other processes ---------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from dataclasses import replace
from tests.disagg.test_faults import QUICK, half, DisaggregationMode
prefill = half(DisaggregationMode.PREFILL, backend=sys.argv[1], options=QUICK)
print(prefill.transfers.port, flush=True)
while True:
    if any(type(event).__name__ == "Offered" for event in prefill.take_news()):
        print("offered", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_stopped_process_is_noticed_and_its_places_are_closed_when_it_is_dead_or_says_so(backend: str) -> None:
    """G-1"""
    decode = half(DisaggregationMode.DECODE, backend=backend, options=QUICK)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", CHILD, backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            for end in (signal.SIGCONT, signal.SIGKILL):
                made = scripted_nowhere(decode, port)
                assert child.stdout.readline() == "offered\n"
                child.send_signal(signal.SIGSTOP)
                assert code_of(decode, made.ticket) == "heartbeat_timeout"
                time.sleep(0.5)  # several tries to meet again
                decode.take_news()
                assert ("Closed" in decode.by_ticket[made.ticket.nonce]) == (backend == "tcp")
                child.send_signal(end)
                assert_ends(decode, made.ticket)
        finally:
            child.kill()
            decode.transfers.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_that_never_says_that_all_arrived_loses_its_lease(backend: str) -> None:
    with pair(backend=backend, options=replace(STEADY, lease_s=1.0)) as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        prefill.wait(Offered, made.ticket)
        decode.transfers._side._settle = lambda *_: None  # type: ignore[method-assign, union-attr]
        whole = spans_of(prefill, N)
        prefill.transfers.submit(Send(ticket=made.ticket, spans=whole, tail=Tail(num_tokens=N, token_id=1)))
        assert code_of(prefill, made.ticket) == "lease_timeout"
        assert code_of(decode, made.ticket) == "lease_timeout"
        for half in (prefill, decode):
            assert_ends(half, made.ticket)
        assert not any(isinstance(event, Arrived | Sent) for event in (*prefill.news, *decode.news))
