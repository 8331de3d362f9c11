"""C22: who is not there, or is another, is told of by name, and harms nobody."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from forebay.base.errors import ConfigError, WireError
from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.requests.transfers import Broken, Decline, Offer, Offered, Withdraw
from forebay.requests.updates import Failure
from forebay.transfer.session import connection, peers
from forebay.transfer.wire import frames
from forebay.transfer.wire.framing import MAX_FIRST_BYTES
from tests.deadlines import NEVER_S, wait_until
from tests.transfer.ends import GONE, STEADY, N, assert_ends, code_of
from tests.transfer.pair import EVERYTHING, OPTIONS, PLAIN, half, layout_of, offer, pair, spans_of, transfer
from tests.transfer.scripted import decode_alone, nobody_listens, scripted_nowhere, scripted_offer


def test_each_way_not_to_meet_has_its_code() -> None:
    with (
        pair(PLAIN, options=replace(STEADY, bootstrap_timeout_s=2.0)) as (prefill, decode),
        socket.create_server(("127.0.0.1", 0)) as silent,  # accepts, and never answers
    ):
        for made in [scripted_nowhere(decode, port) for port in (silent.getsockname()[1], nobody_listens())]:
            assert code_of(decode, made.ticket) == "bootstrap_timeout"
            assert_ends(decode, made.ticket)
        transfer(prefill, decode, N)


def test_another_layout_or_backend_is_refused_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
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
        assert any(line.startswith("decode_refused ") and words[0] in line for line in caplog.messages)
        wait_until(lambda d=decode: not d.transfers._stage._peers)  # nobody is called again
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


@pytest.mark.parametrize("older", [peers, connection], ids=["decode", "prefill"])
def test_another_protocol_is_refused_with_both_numbers(older: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "PROTOCOL", 0)
    numbers = (frames.PROTOCOL, 0) if older is peers else (0, frames.PROTOCOL)
    with pair(options=STEADY) as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        broken = decode.wait(Broken, made.ticket)
        assert isinstance(broken, Broken)
        assert broken.failure.code == "layout_mismatch"
        assert "protocol: prefill speaks {}, decode {}".format(*numbers) in broken.failure.message
        assert_ends(decode, made.ticket)


def test_prefill_peer_of_another_protocol_is_answered_and_sent_away() -> None:
    near, far = socket.socketpair()
    with near, far:
        prefill = connection.Connection(near, "there", lambda: 0.0, Chaos())
        prefill.await_greeting(b"k")
        hello = frames.Hello(protocol=frames.PROTOCOL + 1, instance="d", epoch=1, nonce=bytes(32))
        with pytest.raises(WireError, match=f"decode speaks protocol {frames.PROTOCOL + 1}, prefill"):
            prefill.admit(b"k", hello, "p")
        assert far.recv(1 << 12)


def test_c33_prefill_recorded_greeting_lets_little_be_held() -> None:
    """Whoever repeats a recorded `Hello` has not shown that they have the key."""
    near, far = socket.socketpair()
    with near, far:
        prefill = connection.Connection(near, "there", lambda: 0.0, Chaos())
        prefill.await_greeting(b"k")
        prefill.admit(b"k", frames.Hello(protocol=frames.PROTOCOL, instance="d", epoch=1, nonce=bytes(32)), "p")
        far.sendall(struct.pack("<IIQ", MAX_FIRST_BYTES + 1, 1, 0) + bytes(32))
        with pytest.raises(WireError, match=f"the cap is {MAX_FIRST_BYTES}"):
            next(prefill.receive())


@pytest.mark.parametrize(("backend", "module"), [("nixl", "nixl_cu12._bindings"), ("mooncake", "mooncake.engine")])
def test_a_library_that_cannot_be_loaded_is_named(backend: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"forebay.transfer.transports.{backend}", raising=False)
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
    assert prefill.take_updates() == []
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
