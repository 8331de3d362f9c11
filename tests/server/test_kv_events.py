"""The sockets of the events of the prefix cache: numbers, gaps, replay, and subscribers that do not read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import pytest
import zmq

from forebay.base.errors import ConfigError
from forebay.server.kv_events import END, KvEventPublisher
from tests.deadlines import HANGS_S
from tests.memory.test_cache_events import KEY_OF_TWO, published_tree
from tests.simulation.published import Subscriber


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


# Messages in the format of vLLM 0.33, whose encoder leaves out fields that are null (`omit_defaults`): a prefix of two
# pages, one behind it of layers with a window, and its end. Hashes of vLLM may be bytes or, as here, numbers.
VLLM: Final = [
    [
        1764396000.25,
        [
            {
                "type": "BlockStored",
                "block_hashes": [11881829733434105311, 2870129431182205124],
                "parent_block_hash": None,
                "token_ids": [*range(32)],
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {
                "type": "BlockStored",
                "block_hashes": [2870129431182205124],
                "parent_block_hash": 11881829733434105311,
                "token_ids": [*range(16, 32)],
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 1,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 512,
            },
        ],
        0,
    ],
    [1764396001.5, [{"type": "BlockRemoved", "block_hashes": [11881829733434105311], "medium": "GPU", "group_idx": 0}]],
    [1764396002.0, [{"type": "AllBlocksCleared"}], 0],
]


def test_one_decoder_reads_the_format_of_vllm_and_ours() -> None:
    theirs, ours = Subscriber(), Subscriber()
    theirs.take(msgspec.msgpack.encode(batch) for batch in VLLM[:2])
    assert {key: len(hashes) for key, hashes in theirs.cached.items()} == {
        ("GPU", "full_attention"): 1,
        ("GPU", "sliding_window"): 1,
    }
    theirs.take([msgspec.msgpack.encode(VLLM[2])])
    assert not theirs.cached
    tree, events = published_tree()
    tree.insert(KEY_OF_TWO, np.array([1, 2]), 7)
    ours.take(batches := [*events.take()])
    assert {key: len(hashes) for key, hashes in ours.cached.items()} == {("CPU", "full_attention"): 2}
    stored = msgspec.msgpack.decode(batches[0])
    assert [stored[0], stored[2]] == [5.0, 0]
    assert {**stored[1][0], "block_hashes": len(stored[1][0]["block_hashes"])} == {
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
