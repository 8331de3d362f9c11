"""C33: no message of a peer that has the key ends anything but the session with this peer."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from forebay.base.errors import EngineError, WireError
from forebay.config.engine_config import DisaggregationMode
from forebay.requests.pieces import Chunk
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Arrived, Closed, Offered, Send, Tail, Ticket, Withdraw
from forebay.requests.updates import CacheReport
from forebay.transfer.session.connection import ConnectionLost
from forebay.transfer.session.prefill import PrefillStage
from forebay.transfer.wire import frames
from forebay.transfer.wire.frames import PROTOCOL, Layout
from forebay.transfer.wire.framing import FrameEncoder, Keys
from tests.deadlines import wait_until
from tests.transfer.altered import alterations
from tests.transfer.ends import GONE, N, assert_ends
from tests.transfer.pair import EVERYTHING, KEY, Half, half, layout_of, spans_of, transfer
from tests.transfer.scripted import Peer, ScriptedPrefill, hello, scripted_decode, scripted_offer

PARTS = 48  # of all alterations; the suite tries one part, the long tier all


def parts() -> list[Any]:
    return [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, PARTS))]


class HostileDecode:
    """A decode engine with the key: its session with a prefill engine, and what it offers."""

    def __init__(self, prefill: Half, **layout: Any) -> None:
        self.prefill, self.nonce, self.instance = prefill, secrets.token_bytes(16), secrets.token_hex(16)
        self.layout = msgspec.structs.replace(layout_of(prefill.cache), **layout)
        self.peers: list[Peer] = []

    def connect(self, *, data: bool = False) -> Peer:
        self.peers.append(scripted_decode(self.prefill.transfers.port, hello(self.instance, 1, data=data)))
        return self.peers[-1]

    @property
    def introduce(self) -> frames.Introduce:
        return frames.Introduce(layout=self.layout, transports=["tcp"], machine="")

    def join(self) -> Peer:
        control = self.connect()
        control.send(self.introduce)
        control.wait(frames.Welcome)
        self.connect(data=True).send(frames.Attach())
        control.wait(frames.Joined)
        return control

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.instance, 7, self.nonce)

    def offering(self, num_tokens: int = N) -> frames.Offering:
        places = {kind: frames.Places.of(span) for kind, span in spans_of(self.prefill, num_tokens).items()}
        return frames.Offering(
            nonce=self.nonce, room=7, num_tokens=num_tokens, digest=b"digest", start=0, places=places
        )

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def serve(prefill: Half) -> None:
    """What an engine does for each offer: it sends all of the prompt."""
    for event in prefill.take_updates():
        if isinstance(event, Offered) and event.declined is None:
            assert 0 <= event.start < event.num_tokens < 2**31
            tail = Tail(num_tokens=event.num_tokens, token_id=1)
            num_tokens = min(event.num_tokens, N)
            prefill.transfers.submit(Send(ticket=event.ticket, spans=spans_of(prefill, num_tokens), tail=tail))


def is_balanced(prefill: Half) -> bool:
    serve(prefill)
    side = prefill.transfers._stage
    assert isinstance(side, PrefillStage)
    return not (side._shipments.open or side._sessions or side._guests)


def still_open(prefill: Half) -> set[Ticket]:
    """Return the tickets that were offered and not closed, each once, by what the engine was told."""
    found = set[Ticket]()
    for event in prefill.news:
        if isinstance(event, Offered) and event.declined is None:
            assert event.ticket not in found
            found.add(event.ticket)
        if isinstance(event, Closed):
            found.remove(event.ticket)
    return found


def assert_serves_another(prefill: Half) -> None:
    """The hostile sessions are over, every ticket is closed, and an honest peer gets its prompt."""
    wait_until(lambda: is_balanced(prefill) and not still_open(prefill))
    decode = half(DisaggregationMode.DECODE, EVERYTHING, backend="tcp")
    try:
        transfer(prefill, decode, N)
    finally:
        decode.transfers.close()


@contextlib.contextmanager
def engine(mode: DisaggregationMode) -> Iterator[Half]:
    made = half(mode, EVERYTHING, backend="tcp")
    try:
        yield made
    finally:
        made.transfers.close()


@pytest.mark.parametrize("page_size", [2**20, 2**34, 2**44, 2**62])
def test_prefill_peer_claims_huge_pages_session_ends_and_engine_serves_another(page_size: int) -> None:
    """A page of 2^44 tokens made the thread that owns all sessions allocate 128 TiB of places."""
    with engine(DisaggregationMode.PREFILL) as prefill:
        peer = HostileDecode(prefill, page_size=page_size)
        control = peer.connect()
        control.send(peer.introduce)
        wait_until(lambda: is_refused(control))
        peer.close()
        assert prefill.transfers.num_rejected == 1
        assert_serves_another(prefill)


def is_refused(peer: Peer) -> bool:
    try:
        return bool([*peer.link.receive()]) and False
    except ConnectionLost:
        return True


@pytest.mark.parametrize("part", parts())
def test_prefill_any_field_of_any_frame_altered_engine_serves_another(part: int) -> None:
    with engine(DisaggregationMode.PREFILL) as prefill:
        for name, play in [*_against_prefill(prefill)][part::PARTS]:
            peer = HostileDecode(prefill)
            try:
                play(peer)
                serve(prefill)
            except (ConnectionLost, WireError):
                pass
            except (AssertionError, EngineError) as error:
                raise AssertionError(name) from error
            finally:
                peer.close()
        assert_serves_another(prefill)


def _against_prefill(prefill: Half) -> Iterator[tuple[str, Callable[[HostileDecode], None]]]:
    """Every altered frame, and how to come to where it is due."""
    honest = HostileDecode(prefill)
    joined: list[msgspec.Struct] = [
        honest.offering(),
        frames.Withdrawn(honest.nonce, GONE),
        frames.Settled(honest.nonce),
        frames.Declined(honest.nonce, 7, N, b"digest", GONE),
        frames.Beat([honest.nonce]),
        frames.Invite(b"address"),
    ]

    def greeting(changed: Any) -> Callable[[HostileDecode], None]:
        def play(peer: HostileDecode) -> None:
            stranger = Peer(socket.create_connection(("127.0.0.1", peer.prefill.transfers.port)))
            peer.peers.append(stranger)
            stranger.link.greet(KEY, changed)

        return play

    def introduced(changed: Any) -> Callable[[HostileDecode], None]:
        return lambda peer: peer.connect().send(changed)

    def after(changed: Any) -> Callable[[HostileDecode], None]:
        def play(peer: HostileDecode) -> None:
            control = peer.join()
            control.send(peer.offering())
            wait_until(lambda: serve(prefill) or peer.nonce in prefill.by_ticket)
            control.send(changed)

        return play

    for name, changed in alterations(hello(honest.instance, 1)):
        yield name, greeting(changed)
    for name, changed in alterations(honest.introduce):
        yield name, introduced(changed)
    for frame in joined:
        for name, changed in alterations(frame):
            yield name, after(changed)


@pytest.mark.parametrize("seed", range(4))
def test_prefill_frames_in_any_order_engine_serves_another(seed: int) -> None:
    rng = random.Random(seed)
    with engine(DisaggregationMode.PREFILL) as prefill:
        for _ in range(20):
            peer = HostileDecode(prefill)
            control = peer.join() if rng.random() < 0.5 else peer.connect(data=rng.random() < 0.5)
            said: list[msgspec.Struct] = [
                *(peer.introduce, frames.Attach(), peer.offering(), frames.Settled(peer.nonce), frames.Invite(b"")),
                *(frames.Withdrawn(peer.nonce, GONE), frames.Declined(peer.nonce, 7, N, b"digest", GONE)),
                *(frames.Beat(), frames.Fenced(peer.nonce), frames.Joined(), hello(peer.instance, 2)),
            ]
            with contextlib.suppress(ConnectionLost):
                for frame in rng.choices(said, k=8):
                    control.send(frame)
                    serve(prefill)
            peer.close()
        assert_serves_another(prefill)


# -- decode ------------------------------------------------------------------------------------------------------------


TAIL = Tail(
    num_tokens=N,
    token_id=3,
    cache=CacheReport(cached_tokens=4, kv_tokens=8, resumable={"state": 4}),
    logprob=TokenLogprob(3, -1.0, 1, [3, 4], [-1.0, -2.0]),
    prompt_logprobs=[None, TokenLogprob(3, -1.0, 1, [3], [-1.0])],
)


@pytest.mark.parametrize("part", parts())
def test_decode_any_field_of_any_frame_altered_engine_serves_another(part: int) -> None:
    with engine(DisaggregationMode.DECODE) as decode:
        layout = layout_of(decode.cache)
        for name, play in [*_against_decode(layout)][part::PARTS]:
            peer = ScriptedPrefill()
            made = scripted_offer(peer, decode)
            try:
                play(peer, decode, made.ticket.nonce)
            except (ConnectionLost, WireError):
                pass
            except (AssertionError, EngineError) as error:
                raise AssertionError(name) from error
            finally:
                peer.close()
            decode.transfers.submit(Withdraw(made.ticket, GONE))
            assert_ends(decode, made.ticket)
        assert_serves_another_prompt(decode)


def assert_serves_another_prompt(decode: Half) -> None:
    wait_until(lambda: not (decode.transfers._stage._peers or decode.transfers._stage._receipts))
    assert not decode.transfers._data_thread.receiver.arrivals
    for event in decode.news:
        if isinstance(event, Arrived):
            assert 0 <= event.tail.token_id < 100
    prefill = half(DisaggregationMode.PREFILL, EVERYTHING, backend="tcp")
    try:
        transfer(prefill, decode, N)
    finally:
        prefill.transfers.close()


def _against_decode(layout: Layout) -> Iterator[tuple[str, Callable[[ScriptedPrefill, Half, bytes], None]]]:
    nonce, challenge = b"n" * 16, frames.Challenge(protocol=PROTOCOL, instance="scripted", nonce=b"c" * 32)

    def challenged(changed: Any) -> Callable[[ScriptedPrefill, Half, bytes], None]:
        def play(peer: ScriptedPrefill, decode: Half, nonce: bytes) -> None:
            control = peer.control = Peer(peer.listener.accept()[0])
            control.link.await_greeting(KEY)
            control.wait(frames.Hello)
            control.link.encoder = FrameEncoder(Keys(KEY).to_decode, 0)
            control.send(changed)

        return play

    def welcomed(changed: Any) -> Callable[[ScriptedPrefill, Half, bytes], None]:
        def play(peer: ScriptedPrefill, decode: Half, nonce: bytes) -> None:
            peer.control = peer._accept("scripted")
            peer.control.wait(frames.Introduce)
            peer.control.send(changed)

        return play

    def joined(changed: Any) -> Callable[[ScriptedPrefill, Half, bytes], None]:
        def play(peer: ScriptedPrefill, decode: Half, nonce: bytes) -> None:
            peer.join(decode, layout, "tcp")
            peer.control.wait(frames.Offering)
            peer.control.send(_named(changed, nonce))

        return play

    def chunked(changed: Any) -> Callable[[ScriptedPrefill, Half, bytes], None]:
        def play(peer: ScriptedPrefill, decode: Half, nonce: bytes) -> None:
            peer.join(decode, layout, "tcp")
            peer.control.wait(frames.Offering)
            peer.send_chunk(_named(changed, nonce), b"\0" * 4096)

        return play

    for name, changed in alterations(challenge):
        yield name, challenged(changed)
    for frame in (frames.Welcome(layout, "tcp", "", 0), frames.Refused(GONE)):
        for name, changed in alterations(frame):
            yield name, welcomed(changed)
    chunk = Chunk(nonce=nonce, kind="kv", region=0, num_regions=1, first=0, end=N, num_bytes=4096, checksum=1)
    said = [frames.Completed(nonce, TAIL), frames.Withdrawn(nonce, GONE), frames.Fenced(nonce), frames.Beat([nonce])]
    for frame in [*said, frames.Resting(True), frames.Joined(), chunk]:
        for name, changed in alterations(frame):
            yield name, joined(changed)
    for name, changed in alterations(chunk):
        yield name, chunked(changed)


def _named(changed: Any, nonce: bytes) -> Any:
    """The same about the ticket that is open, where the alteration is of something else."""
    if isinstance(changed, dict) and changed.get("nonce") == b"n" * 16:
        return {**changed, "nonce": nonce}
    return changed
