"""C22: whoever is lost, and what is lost on the way: places are closed when nobody can touch them, and not before."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

import pytest

from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.requests import pieces
from forebay.requests.pieces import Chunk
from forebay.requests.transfers import Arrived, Broken, Event, Offer, Offered, Send, Sent, Tail, Withdraw
from forebay.transfer.state.tickets import DecodeEvent
from forebay.transfer.transports import shm
from forebay.transfer.transports.shm import ShmWriter
from forebay.transfer.wire import frames
from forebay.transfer.wire.faults import Faults
from tests.deadlines import wait_until
from tests.transfer.ends import GONE, QUICK, STEADY, N, assert_ends, code_of
from tests.transfer.pair import BACKENDS, Half, half, layout_of, offer, pair, sent, spans_of, transfer
from tests.transfer.scripted import decode_alone, scripted_nowhere, scripted_offer


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
        peer.join(decode, layout_of(decode.cache), "shm", beats=True)
        peer.control.wait(frames.Offering)
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        peer.control.wait(frames.Withdrawn)
        decode.wait(Broken, made.ticket)
        assert decode.transfers.num_unfenced == 1
        peer.control.close()
        peer.join(decode, layout_of(decode.cache), "shm", "successor", beats=True)
        peer.control.wait(frames.Withdrawn)
        other = scripted_offer(peer, decode)
        peer.control.wait(frames.Offering)
        peer.control.send(frames.Fenced(made.ticket.nonce), frames.Withdrawn(other.ticket.nonce, GONE))
        decode.wait(Broken, other.ticket)
        assert decode.by_ticket[made.ticket.nonce] == ["Broken"]
        assert decode.transfers.num_unfenced == 2
        peer.control.send(frames.Fenced(other.ticket.nonce))
        assert_ends(decode, other.ticket)
        peer.control.close()
        peer.join(decode, layout_of(decode.cache), "shm", beats=True)
        peer.control.wait(frames.Withdrawn)
        peer.control.send(frames.Fenced(made.ticket.nonce))
        assert_ends(decode, made.ticket)


class Lost(ShmWriter):
    """Begins to write, and never learns what became of it."""

    holds_places = True
    closes_at_once = False
    is_lost = True

    def advance(self) -> Chunk | None:
        raise OSError("lost")


def test_a_write_of_which_nobody_knows_the_end_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side, while others go on."""
    with pair(backend="shm", options=STEADY) as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(shm, "ShmWriter", Lost)
            made = sent(prefill, decode, N)
            assert {code_of(half, made.ticket) for half in (prefill, decode)} == {"peer_lost"}
        for _ in range(2):
            transfer(prefill, decode, N)
        for half in (prefill, decode):
            half.take_updates()
            assert "Closed" not in half.by_ticket[made.ticket.nonce]
        assert decode.transfers.num_unfenced == 1


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_on_purpose_end_every_ticket_rightly_or_with_a_reason(backend: str) -> None:
    chaos = Chaos(drop=0.04, double=0.04, reorder=0.04, alter=0.04, delay_s=0.001)
    options = replace(QUICK, chaos=chaos, bootstrap_timeout_s=1.0, lease_s=1.0)
    endings = set[str]()
    with pair(backend=backend, options=options) as (prefill, decode):
        for i in takewhile(lambda i: i < 15 or len(endings) < 2, count()):
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
    monkeypatch.setattr(pieces, "CHUNK_BYTES", 1 << 10)
    with pair(backend=backend, options=STEADY) as (prefill, decode):
        transfer(prefill, decode, N)
        [box] = prefill.transfers._data_thread.sender.outboxes.values()
        box.writer._faults = spoiled = Faults(Chaos(**{fault: 1.0}), lambda: 0.0)
        spoiled._random = Once()
        made = sent(prefill, decode, N)
        assert code_of(decode, made.ticket) == code
        for half in (prefill, decode):
            assert_ends(half, made.ticket)
        transfer(prefill, decode, N)


def has_any(half: Half, made: Offer, kind: type[Event]) -> bool:
    select.select([half.transfers], [], [], 0.01)
    half.take_updates()
    return kind.__name__ in half.by_ticket.get(made.ticket.nonce, ())


CHILD = """
import sys, time
from dataclasses import replace
from forebay.config.engine_config import DisaggregationMode
from tests.transfer.ends import QUICK
from tests.transfer.pair import half
prefill = half(DisaggregationMode.PREFILL, backend=sys.argv[1], options=QUICK)
print(prefill.transfers.port, flush=True)
while True:
    if any(type(event).__name__ == "Offered" for event in prefill.take_updates()):
        print("offered", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
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
                decode.take_updates()
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
        [peer] = decode.transfers._stage._peers.values()
        step = peer.step
        peer.step = lambda receipt, what: None if what is DecodeEvent.LANDED else step(receipt, what)
        whole = spans_of(prefill, N)
        prefill.transfers.submit(Send(ticket=made.ticket, spans=whole, tail=Tail(num_tokens=N, token_id=1)))
        assert code_of(prefill, made.ticket) == "lease_timeout"
        assert code_of(decode, made.ticket) == "lease_timeout"
        for half in (prefill, decode):
            assert_ends(half, made.ticket)
        assert not any(isinstance(event, Arrived | Sent) for event in (*prefill.news, *decode.news))
