"""Frames over a socket pair: what is sent arrives, and nothing a peer can send does more than raise a typed error."""

from __future__ import annotations

import itertools
import pickle
import random
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine import channel as channel_module
from forebay.engine.channel import (
    MAX_FRAME_BYTES,
    RECEIVE_BYTES,
    Channel,
    ChannelClosed,
    ChannelError,
    FrameDecoder,
    FrameEncoder,
    FrameTooLarge,
)
from forebay.engine.frames import AbortRequest, AddRequest, FromEngine, GetState, ToEngine, Updates
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, Failure, FinishReason, MissReason, Update
from tests.deadlines import HANGS_S, wait_until

FRAMES = [
    AddRequest(request_id=1, prompt_token_ids=[1, 2, 3], params=SamplingParams(logit_bias={5: 1.5}), namespace="a"),
    AbortRequest(request_id=2**40),
    GetState(serial=7),
]


def encoded(*frames: msgspec.Struct) -> bytes:
    encoder = FrameEncoder()
    return b"".join(encoder.encode(frame) for frame in frames)


def framed(body: bytes, sequence: int = 0) -> bytes:
    return struct.pack("<II", len(body), sequence) + body


def forever(act: Callable[[], object]) -> None:
    while True:
        act()


@pytest.fixture
def pair() -> Iterator[tuple[Channel[ToEngine], socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        channel: Channel[ToEngine] = Channel(ours, ToEngine)
        yield channel, theirs
        channel.close()


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_frames_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    data = encoded(*FRAMES)
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    received = [frame for a, b in itertools.pairwise(bounds) for frame in decoder.feed(data[a:b])]
    assert received == FRAMES


def test_updates_arrive_equal() -> None:
    updates = Updates(
        updates=[
            Update(request_id=1, token_ids=[5], cache=CacheReport(16, MissReason.DIVERGED)),
            Update(2, [], finish=FinishReason.ERROR, failure=Failure("EngineError", "step_failed", "x")),
        ]
    )
    assert FrameDecoder[FromEngine](FromEngine).feed(encoded(updates)) == [updates]


def test_a_steps_tokens_travel_as_two_arrays_and_the_rest_as_it_is() -> None:
    first = Update(1, [5], cache=CacheReport(16, MissReason.DIVERGED))
    last = Update(3, [8], finish=FinishReason.LENGTH)
    frame = Updates.pack([Update(2, [7]), first, last, Update(5, [9]), Update(5, [10])])
    assert (frame.request_ids, frame.token_ids, frame.counts) == ([2, 5, 5], [7, 9, 10], [])
    assert frame.updates == [first, last]
    assert FrameDecoder[FromEngine](FromEngine).feed(encoded(frame)) == [frame]


def test_several_tokens_of_a_request_travel_with_their_number() -> None:
    scored = Update(3, [8, 9], logprobs=[TokenLogprob(8, -1.0, 1), TokenLogprob(9, -1.0, 1)])
    frame = Updates.pack([Update(2, [7]), Update(4, [1, 2, 3]), scored, Update(5, [9, 10])])
    assert (frame.request_ids, frame.token_ids, frame.counts) == ([2, 4, 5], [7, 1, 2, 3, 9, 10], [1, 3, 2])
    assert list(frame.tokens()) == [(2, [7]), (4, [1, 2, 3]), (5, [9, 10])]
    assert frame.updates == [scored]
    assert FrameDecoder[FromEngine](FromEngine).feed(encoded(frame)) == [frame]


UPDATES = st.builds(
    Update,
    st.integers(1, 4),
    st.lists(st.integers(0, 99), max_size=3),
    finish=st.sampled_from([None, None, None, FinishReason.LENGTH]),
)


@given(updates=st.lists(UPDATES, max_size=12))
def test_each_request_s_news_arrive_whole_and_in_order(updates: list[Update]) -> None:
    frame = Updates.pack(updates)
    arrived = [*starmap(Update, frame.tokens()), *frame.updates]
    for request_id in range(1, 5):
        assert [u for u in arrived if u.request_id == request_id] == [u for u in updates if u.request_id == request_id]


def test_a_requests_news_stay_in_order_when_two_steps_share_a_frame() -> None:
    first, second, end = Update(1, [5], cache=CacheReport()), Update(1, [6]), Update(1, [7], finish=FinishReason.STOP)
    frame = Updates.pack([first, second, end])
    assert (frame.request_ids, frame.updates) == ([], [first, second, end])


def test_tokens_without_a_request_are_no_frame() -> None:
    for fields in ({"token_ids": [1, 2]}, {"token_ids": [1], "counts": [2]}, {"token_ids": [], "counts": [0]}):
        body = msgspec.msgpack.encode({"type": "updates", "request_ids": [1], **fields})
        with pytest.raises(ChannelError):
            FrameDecoder[FromEngine](FromEngine).feed(framed(body))


@settings(max_examples=300)
@given(junk=st.binary(min_size=1, max_size=400))
def test_random_bodies_raise_a_typed_error_and_execute_nothing(junk: bytes) -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    with pytest.raises(ChannelError):
        decoder.feed(framed(junk))


@settings(max_examples=300)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_decodes_to_a_frame_of_the_union(position: int, value: int) -> None:
    data = bytearray(encoded(*FRAMES))
    data[position % len(data)] = value
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    try:
        frames = decoder.feed(data)
    except ChannelError:
        return
    assert all(isinstance(frame, ToEngine) for frame in frames)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


HOSTILE = {
    "a pickle": pickle.dumps(Bomb()),
    "an extension type": msgspec.msgpack.encode(msgspec.msgpack.Ext(42, pickle.dumps(Bomb()))),
    "a pickle in a wrapper": msgspec.msgpack.encode({"type": "PickleWrapper", "data": pickle.dumps(Bomb())}),
    "an unknown tag": msgspec.msgpack.encode({"type": "eval", "code": "1"}),
    "no tag": msgspec.msgpack.encode({"request_id": 1}),
    "the tag of the other direction": msgspec.msgpack.encode({"type": "updates", "updates": []}),
    "a field of another type": msgspec.msgpack.encode({"type": "abort", "request_id": "1"}),
    "a missing field": msgspec.msgpack.encode({"type": "abort"}),
    "nesting without end": b"\x91" * 100_000,
    "a list that claims four billion entries": b"\xdd\xff\xff\xff\xff",
    "bytes that are no text": msgspec.msgpack.encode({"type": "abort"}).replace(b"abort", b"\xff\xfe\xfd\xfc\xfb"),
    "nothing": b"",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bodies_are_refused_without_a_trace(body: bytes) -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    executed: list[str] = []
    watching = [True]

    def hook(name: str, _: object) -> None:
        if watching[0] and name in ("exec", "compile", "pickle.find_class", "import", "os.system", "subprocess.Popen"):
            executed.append(name)

    sys.addaudithook(hook)
    try:
        with pytest.raises(ChannelError):
            decoder.feed(framed(body))
    finally:
        watching[0] = False
    assert executed == []


def test_an_oversized_length_is_refused_before_anything_is_allocated() -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChannelError, match="cap"):
        decoder.feed(struct.pack("<II", MAX_FRAME_BYTES + 1, 0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB


@pytest.mark.parametrize("sequence", [1, 2**32 - 1])
def test_a_frame_out_of_order_is_refused(sequence: int) -> None:
    body = msgspec.msgpack.encode(GetState())
    with pytest.raises(ChannelError, match="where 0 was due"):
        FrameDecoder[ToEngine](ToEngine).feed(framed(body, sequence))


def test_a_replayed_frame_is_refused() -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    data = encoded(GetState())
    decoder.feed(data)
    with pytest.raises(ChannelError, match="where 1 was due"):
        decoder.feed(data)


def test_after_a_fault_nothing_is_believed_any_more() -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    with pytest.raises(ChannelError):
        decoder.feed(framed(b"\xc1"))
    with pytest.raises(ChannelError):
        decoder.feed(encoded(GetState()))


@pytest.mark.parametrize("seed", range(20))
def test_a_hostile_socket_costs_the_reader_no_memory(seed: int, pair: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, peer = pair
    rng = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peer.sendall(rng.randbytes(100_000))
    with pytest.raises(ChannelError):
        forever(lambda: channel.receive(0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


def test_a_truncated_frame_and_a_close_is_a_closed_channel(pair: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(encoded(*FRAMES)[:-1])
    assert channel.receive(None) == FRAMES[:-1]
    peer.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None)


def test_frames_that_arrived_before_a_close_are_not_lost(pair: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(encoded(*FRAMES))
    peer.close()
    assert channel.receive(None) == FRAMES
    with pytest.raises(ChannelClosed):
        channel.receive(None)


def test_receive_returns_when_its_time_is_up(pair: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, _ = pair
    assert channel.receive(0) == []
    assert channel.receive(0.001) == []


def test_a_frame_over_the_cap_is_not_sent_and_the_next_one_is(
    pair: tuple[Channel[ToEngine], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = pair
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameTooLarge):
        channel.send(Updates(updates=[Update(request_id=1, token_ids=list(range(200)))]))
    small = Updates(updates=[Update(request_id=1, token_ids=[1])])
    channel.send(small)
    assert FrameDecoder[FromEngine](FromEngine).feed(peer.recv(1000)) == [small]


def test_a_peer_that_reads_slowly_loses_nothing(pair: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, peer = pair
    sent = [Updates(updates=[Update(request_id=i, token_ids=list(range(2000)))]) for i in range(300)]
    for frame in sent:
        channel.send(frame)
    assert channel.num_unsent_bytes > 0
    decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
    received: list[FromEngine] = []
    while len(received) < len(sent):
        received += decoder.feed(peer.recv(65536))
        channel.flush()
    assert received == sent


def test_a_peer_that_never_reads_is_taken_for_dead() -> None:
    ours, theirs = socket.socketpair()
    channel: Channel[ToEngine] = Channel(ours, ToEngine, max_unsent_bytes=1 << 20)
    frame = Updates(updates=[Update(request_id=1, token_ids=list(range(10_000)))])
    with theirs, pytest.raises(ChannelClosed, match="taken for dead"):
        forever(lambda: channel.send(frame))
    assert channel.num_unsent_bytes < 2 << 20
    channel.close()


# -- reading ahead ----------------------------------------------------------------------------------------------------

BLOCK: Final = 64 << 10  # bytes of a frame


def requests(num: int) -> list[ToEngine]:
    prompt = [1 << 20] * (BLOCK // 5)
    return [AddRequest(request_id=i, prompt_token_ids=prompt, params=SamplingParams()) for i in range(num)]


@pytest.fixture
def ahead(pair: tuple[Channel[ToEngine], socket.socket]) -> Iterator[tuple[Channel[ToEngine], socket.socket]]:
    channel, _ = pair
    channel.read_ahead()
    yield pair
    channel.close()
    assert channel._reader is not None
    assert not channel._reader.is_alive()


def sending(peer: socket.socket, frames: Sequence[ToEngine]) -> threading.Thread:
    thread = threading.Thread(target=peer.sendall, args=(encoded(*frames),), daemon=True)
    thread.start()
    return thread


def all_of(channel: Channel[ToEngine], num: int) -> list[ToEngine]:
    received: list[ToEngine] = []
    while len(received) < num:
        received += channel.receive(HANGS_S)
    return received


def test_c32_channel_reads_ahead_what_arrives_during_a_step(ahead: tuple[Channel[ToEngine], socket.socket]) -> None:
    """Else a request behind many others arrives many steps later than these were sent."""
    channel, peer = ahead
    sender = sending(peer, sent := requests(200))
    sender.join(HANGS_S)
    assert not sender.is_alive(), "nothing reads while no call of receive waits"
    first = channel.receive(0)
    assert len(first) > 150  # all but what is still in the kernel
    assert first + all_of(channel, 200 - len(first)) == sent


def test_channel_reads_ahead_no_more_than_its_bound(
    ahead: tuple[Channel[ToEngine], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 1 << 20)
    channel, peer = ahead
    sender = sending(peer, sent := requests(200))
    wait_until(lambda: bool(channel._reading._waiters) or not sender.is_alive())  # type: ignore[attr-defined]
    assert sender.is_alive(), "all was read ahead"
    assert channel._num_ahead_bytes < (1 << 20) + RECEIVE_BYTES
    assert all_of(channel, len(sent)) == sent
    sender.join(HANGS_S)


def test_channel_that_reads_ahead_wakes_a_receiver_that_waits(ahead: tuple[Channel[ToEngine], socket.socket]) -> None:
    channel, peer = ahead
    encoder = FrameEncoder()
    for frame in FRAMES:
        sender = threading.Thread(target=peer.sendall, args=(encoder.encode(frame),))
        sender.start()
        assert all_of(channel, 1) == [frame]
        sender.join()


def test_channel_that_reads_ahead_gives_all_frames_before_the_end(
    ahead: tuple[Channel[ToEngine], socket.socket],
) -> None:
    channel, peer = ahead
    sender = sending(peer, sent := requests(50))
    sender.join(HANGS_S)
    peer.close()
    wait_until(lambda: channel._error is not None)
    assert all_of(channel, 50) == sent
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            forever(lambda: channel.receive(HANGS_S))
