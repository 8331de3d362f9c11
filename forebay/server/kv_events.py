"""The sockets at which routers get the events of the prefix cache. Needs the extra `forebay[kv-events]`.

A message has three frames: the topic, which is empty, the number of the batch (8 bytes, big endian), and the batch. A
subscriber that is slow or absent loses batches, and sees it by the numbers. The replay socket sends all kept batches
from a number on. They come as such messages, and behind them one with the number 2**64 - 1 and no batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

import zmq

from forebay.base.errors import ConfigError
from forebay.base.wake import WakingQueue

TOPIC: Final = b""
SEQUENCE_BYTES: Final = 8
END: Final = b"\xff" * SEQUENCE_BYTES  # in the place of a number: nothing more to replay
MOST_WAITING: Final = 4096  # batches for the thread, and for each subscriber
MOST_KEPT: Final = 10_000  # batches for replay
MOST_KEPT_BYTES: Final = 64 << 20
_MOST_REQUEST_BYTES: Final = 256  # of a frame that a client sends


class KvEventPublisher:
    """Publishes batches on a thread of its own, which owns the sockets. Nothing waits for a subscriber."""

    def __init__(self, address: str, replay_address: str = "", *, most_waiting: int = MOST_WAITING) -> None:
        """Raises ConfigError if an address cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        self._most_waiting = most_waiting
        self._waiting: WakingQueue[tuple[bytes, bytes]] = WakingQueue(time.monotonic)
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._num_kept_bytes = self._next = 0
        self._closing = False
        self._publish = self._bind("--kv-events", zmq.PUB, address, most_waiting)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_address:
            self._replay = self._bind("--kv-events-replay", zmq.ROUTER, replay_address, MOST_KEPT + 1)
        self._thread = threading.Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, option: str, kind: int, address: str, most_waiting: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, most_waiting)
        socket.set(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{option} {address}: cannot listen there ({error.strerror}): give another port"
            ) from None
        return socket

    def put(self, batch: bytes) -> None:
        """Publish an encoded batch. If the thread is far behind, the batch is lost, and so its number."""
        number = self._next.to_bytes(SEQUENCE_BYTES, "big")
        self._next += 1
        if len(self._waiting.items) < self._most_waiting:
            self._waiting.put((number, batch))

    def close(self) -> None:
        """Publish what waits, and close the sockets."""
        self._closing = True
        self._waiting.wake()
        self._thread.join()
        self._context.destroy(linger=100)
        self._waiting.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waiting.fileno(), zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        closes = False
        while not closes:
            ready = dict(poller.poll())
            closes = self._closing
            for number, batch in self._waiting.take():
                self._send(self._publish, [TOPIC, number, batch])
                self._keep(number, batch)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _keep(self, number: bytes, batch: bytes) -> None:
        if self._replay is None:
            return
        self._kept.append((number, batch))
        self._num_kept_bytes += len(batch)
        while len(self._kept) > MOST_KEPT or self._num_kept_bytes > MOST_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send a client the kept batches from the number that it asks for; a message of another form gets no answer."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        client, _, first = frames
        for number, batch in self._kept:
            if number >= first:
                self._send(replay, [client, b"", TOPIC, number, batch])
        self._send(replay, [client, b"", TOPIC, END, b""])

    @staticmethod
    def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return  # as for any slow subscriber, the numbers have a gap
