"""C22: whatever a peer says or withdraws, a ticket ends once, nothing is written behind its end, and others go on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from forebay.config.engine_config import DisaggregationMode
from forebay.requests.transfers import Closed, Offered, Renewed, Send, Span, Tail, Withdraw
from forebay.transfer.session.connection import ConnectionLost
from forebay.transfer.transports import tcp
from forebay.transfer.wire import frames, memory
from forebay.transfer.wire.memory import HostMemory
from tests.deadlines import wait_until
from tests.transfer.ends import GONE, N, assert_ends, code_of
from tests.transfer.pair import BACKENDS, EVERYTHING, half, layout_of, offer, pair, sent, spans_of, transfer
from tests.transfer.scripted import Peer, decode_alone, hello, scripted_decode, scripted_offer


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


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_an_altered_chunk_breaks_its_ticket_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G-5"""
    copy = HostMemory.copy
    with pair(backend=backend) as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(tcp, "sum_of", lambda parts: 1)
            patch.setattr(HostMemory, "copy", lambda *args: copy(*args) ^ 1)
            made = sent(prefill, decode, N)
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
        assert control._find(frames.Joined) is None, "no connection of chunks has been taken"
        right = scripted_decode(port, hello(instance, 5, data=True))
        right.send(frames.Attach())
        control.wait(frames.Joined)
        for peer in (control, late, again, right):
            peer.close()


def is_refused(peer: Peer) -> bool:
    try:
        return bool([*peer.link.receive()]) and False
    except ConnectionLost:
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
