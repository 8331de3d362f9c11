"""The sockets of the events of the prefix cache: numbers, gaps, replay, and subscribers that do not read."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq

from forebay.base.errors import ConfigError
from forebay.server.kv_events import END, KvEventPublisher
from tests.deadlines import HANGS_S, wait_until
from tests.memory.test_cache_events import KEY_OF_TWO, OWNER, key_of, pages, published_tree
from tests.simulation.published import Cached, Subscriber

RECORDED = Path(__file__).parent / "vllm_events.json"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def address() -> str:
    """Return an address of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def subscribe(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KvEventPublisher, where: str, most_waiting: int = 1000
) -> tuple[zmq.Socket[bytes], int]:
    """Return a subscriber that has got a batch, and the number of that."""
    subscriber = context.socket(zmq.SUB)
    subscriber.set(zmq.RCVHWM, most_waiting)
    subscriber.set(zmq.SUBSCRIBE, b"")
    subscriber.connect(where)
    while not subscriber.poll(10):
        publisher.put(b"hello")
    number = int.from_bytes(subscriber.recv_multipart()[1], "big")
    return subscriber, number


def receive(subscriber: zmq.Socket[bytes]) -> tuple[int, bytes]:
    assert subscriber.poll(HANGS_S * 1000), "no batch came"
    topic, number, batch = subscriber.recv_multipart()[-3:]
    assert topic == b""
    assert len(number) == 8
    return int.from_bytes(number, "big"), batch


def replayed(context: zmq.Context[zmq.Socket[bytes]], where: str, first: int) -> list[tuple[int, bytes]]:
    """Return the batches that the replay socket has from a number on."""
    with context.socket(zmq.DEALER) as ask:
        ask.connect(where)
        ask.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            number, batch = receive(ask)
            if number.to_bytes(8, "big") == END:
                return found
            found.append((number, batch))


def test_subscriber_gets_batches_in_their_order(context) -> None:
    where = address()
    publisher = KvEventPublisher(where)
    try:
        subscriber, last = subscribe(context, publisher, where)
        for i in range(20):
            publisher.put(b"batch %d" % i)
        got = []
        while len(got) < 20:
            number, batch = receive(subscriber)
            assert number == (last := last + 1)
            got += [batch] if batch != b"hello" else []
        assert got == [b"batch %d" % i for i in range(20)]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_lost_batch_shows_as_a_gap_and_is_replayed(context) -> None:
    where, again = address(), address()
    publisher = KvEventPublisher(where, again, most_waiting=1 << 20)
    try:
        subscriber, first = subscribe(context, publisher, where)
        subscriber.close()  # it is away for some batches
        lost = first + 1
        for i in range(5):
            publisher.put(b"missed %d" % i)
        wait_until(lambda: b"missed 4" in dict(replayed(context, again, lost)).values())  # all are sent
        _, number = subscribe(context, publisher, where)
        assert number > lost, "nothing was missed"
        found = dict(replayed(context, again, lost))
        assert [*found][: number - lost] == [*range(lost, number)]
        assert [batch for batch in found.values() if batch != b"hello"] == [b"missed %d" % i for i in range(5)]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_subscriber_that_does_not_read_loses_batches_and_delays_none(context) -> None:
    where = address()
    publisher = KvEventPublisher(where, most_waiting=4)
    try:
        slow, _ = subscribe(context, publisher, where, most_waiting=1)
        quick, last = subscribe(context, publisher, where)
        for _ in range(200):
            publisher.put(bytes(1 << 20))
            while not quick.poll(0) and publisher._waiting.items:
                pass
            while quick.poll(1):
                last, _ = receive(quick)
        assert publisher._next - 1 - last < 200
        numbers = []
        while slow.poll(100):
            numbers.append(receive(slow)[0])
        assert len(numbers) < 200, "the slow subscriber got all"
    finally:
        publisher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("frames", [[b"1"], [b"", b"1234567"], [b"x", b"12345678"], [b"", b"1", b"2"]], ids=str)
def test_replay_request_of_another_form_is_ignored(context, frames: list[bytes]) -> None:
    where, again = address(), address()
    publisher = KvEventPublisher(where, again)
    try:
        publisher.put(b"kept")
        with context.socket(zmq.DEALER) as ask:
            ask.connect(again)
            ask.send_multipart(frames)
            ask.send_multipart([b"", bytes(8)])
            assert ask.poll(HANGS_S * 1000)
            assert ask.recv_multipart() == [b"", b"", bytes(8), b"kept"]
            assert ask.recv_multipart() == [b"", b"", END, b""]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_address_in_use_is_refused_with_its_option(context) -> None:
    where = address()
    publisher = KvEventPublisher(where)
    try:
        with pytest.raises(ConfigError, match=r"--kv-events tcp://127.0.0.1:\d+: cannot listen there"):
            KvEventPublisher(where)
    finally:
        publisher.close()
        context.destroy(linger=0)


Frames = Sequence[bytes]


class Stream(NamedTuple):
    """The messages of a publisher, and those that its replay socket sends from a number on."""

    published: list[Frames]
    replay: Callable[[int], list[Frames]]


def of_vllm() -> Stream:
    """Return what the publisher of vLLM 0.33.0 sent: two groups, hashes that are bytes, a state, copies in two other
    tiers, a removal of both groups, and a flush."""
    recorded = json.loads(RECORDED.read_text())
    published, replayed = (
        [[bytes.fromhex(frame) for frame in message] for message in recorded[name]]
        for name in ("published", "replayed")
    )
    return Stream(published, lambda first: [each for each in replayed if number_of(each) >= first])


@contextmanager
def of_ours(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Stream]:
    """Yield what our publisher sends of a tree that grows, branches, loses a page and is flushed."""
    where, again = address(), address()
    publisher = KvEventPublisher(where, again)
    try:
        subscriber, _ = subscribe(context, publisher, where)
        tree, events = published_tree()
        for change in (
            lambda: tree.insert(KEY_OF_TWO, pages(1, 2), OWNER),
            lambda: tree.insert(key_of(0, 1) + key_of(20, 1), pages(3, 4), OWNER),
            lambda: tree.insert(KEY_OF_TWO, pages(5, 6), OWNER, namespace="salted"),
            lambda: tree.evict(1),
            tree.clear,
        ):
            change()
            for batch in events.take():
                publisher.put(batch)
        published: list[Frames] = []
        while len(published) < 5:
            assert subscriber.poll(HANGS_S * 1000), "no batch came"
            frames = subscriber.recv_multipart()
            published += [frames] if frames[2] != b"hello" else []
        yield Stream(
            published,
            lambda first: [
                [b"", number.to_bytes(8, "big"), batch] for number, batch in replayed(context, again, first)
            ],
        )
    finally:
        publisher.close()
        context.destroy(linger=0)


def number_of(frames: Frames) -> int:
    return int.from_bytes(frames[-2], "big")


class Reader:
    """Follows a publisher, and asks it for the messages that it lacks."""

    def __init__(self, stream: Stream) -> None:
        self.subscriber, self.num_asked = Subscriber(), 0
        self._stream, self._next = stream, number_of(stream.published[0])

    def take(self, frames: Frames) -> Cached:
        """Apply a message and return what is cached then."""
        if number_of(frames) > self._next:
            self.num_asked += 1
            for again in self._stream.replay(self._next):
                if self._next <= number_of(again) < number_of(frames):
                    self._apply(again)
        self._apply(frames)
        return self.subscriber.cached

    def _apply(self, frames: Frames) -> None:
        assert number_of(frames) == self._next, "a batch is missing"
        self._next += 1
        self.subscriber.take([frames[-1]])


@pytest.fixture(params=["vllm", "forebay"])
def stream(request: pytest.FixtureRequest, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Stream]:
    if request.param == "vllm":
        yield of_vllm()
        return
    with of_ours(context) as ours:
        yield ours


def test_one_decoder_reads_both_streams_and_gets_lost_messages_again(stream: Stream) -> None:
    whole = Reader(stream)
    expected = [whole.take(frames) for frames in stream.published]
    assert expected[-1] == {}
    assert all(expected[:-1])
    assert whole.num_asked == 0
    for lost in range(1, len(stream.published) - 1):
        reader = Reader(stream)
        kept = [frames for i, frames in enumerate(stream.published) if i != lost]
        assert [reader.take(frames) for frames in kept] == expected[:lost] + expected[lost + 1 :]
        assert reader.num_asked == 1


def test_recorded_stream_of_vllm_has_all_groups_and_tiers() -> None:
    """Its layout is that of vllm/distributed/kv_events.py."""
    reader = Reader(vllm := of_vllm())
    *_, before_removal, after_removal, _ = [reader.take(frames) for frames in vllm.published]
    assert {key: len(hashes) for key, hashes in before_removal.items()} == {
        ("GPU", "full_attention"): 4,
        ("GPU", "sliding_window"): 2,
        ("GPU", "mamba"): 1,
        ("CPU", "full_attention"): 1,
        ("STORAGE", "full_attention"): 2,
    }
    assert {key: len(hashes) for key, hashes in after_removal.items()} == {
        ("GPU", "full_attention"): 3,
        ("GPU", "mamba"): 1,
        ("CPU", "full_attention"): 1,
        ("STORAGE", "full_attention"): 2,
    }


def test_our_events_have_the_fields_of_vllms() -> None:
    theirs = [event for frames in of_vllm().published for event in msgspec.msgpack.decode(frames[2])[1]]
    tree, events = published_tree()
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER)
    (batch,) = events.take()
    ts, (stored,), rank = msgspec.msgpack.decode(batch)
    assert (ts, rank) == (5.0, 0)
    known = {name for event in theirs for name in event}
    assert known - stored.keys() == {"locality", "ownership"}  # of tiers that several servers share
    assert stored.keys() <= known
    assert {**stored, "block_hashes": len(stored["block_hashes"])} == {
        "type": "BlockStored",
        "block_hashes": 2,
        "parent_block_hash": None,
        "token_ids": [*range(8)],
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
        "session_id": None,
    }
