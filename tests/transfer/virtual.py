"""Prefill and decode workers in virtual time: the real sides, sessions and movers, without sockets and threads.

`replaced` puts simulated sockets, links, selectors and threads in place of the real ones. Each worker is then turned by
the simulation, in a random order; frames and chunks take random times and keep their order on each connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from forebay.base import wake as waking
from forebay.requests import pieces
from forebay.requests.pieces import Chunk, KindShape, Piece, chunk_of
from forebay.transfer import worker
from forebay.transfer.session import connection, data_thread, peers, prefill
from forebay.transfer.session.connection import ConnectionLost
from forebay.transfer.wire.frames import PROTOCOL, Challenge
from forebay.transfer.wire.memory import HostMemory, checksum

SLOWEST_S = 0.05  # for a frame on its way
SLOWEST_WRITE_S = 2.5  # of a one-sided writer: longer than a session takes to be lost and begun anew


class Net:
    """Virtual time, and whatever is to happen at some moment of it. `alter` is the chance of a chunk to be altered,
    `slow` of a one-sided write to take long; `slowed_at` is when such writes began."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.alter, self.slow = rng, 0.0, 0.0, 0.0
        self.num_altered = 0
        self.slowed_at: list[float] = []
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.sockets: list[Sock] = []
        self.memories: dict[bytes, Memory] = {}
        self.reaches: list[Reach] = []
        self.works: deque[Callable[[], None]] = deque()  # of threads that wait for something
        self.process = Process()  # that starts just now
        self._fds = count(3)

    def clock(self) -> float:
        return self.now

    def fd(self) -> int:
        return next(self._fds)

    def connect(self, address: tuple[str, int], timeout: float) -> Sock:
        listener = self.listeners.get(address)
        if listener is None or not listener.owner.alive:
            raise ConnectionRefusedError("nobody listens")
        near, far = Sock(self, address), Sock(self, address)
        near.peer, far.peer = far, near
        far.owner = listener.owner
        listener.coming.append(far)
        self.sockets += [near, far]
        return near

    def listen(self, address: tuple[str, int], backlog: int) -> Listener:
        return Listener(self, address, self.process)

    def cut(self, sock: Sock) -> None:
        """The connection ends, as either end hears once all before has been read."""
        for end in (sock, sock.peer):
            end.is_cut = True


@dataclass(eq=False)
class Process:
    """Whoever ends with a process."""

    alive: bool = True


class Sock:
    def __init__(self, net: Net, address: tuple[str, int]) -> None:
        self.net, self.address, self.number = net, address, net.fd()
        self.peer: Sock
        self.owner: Process | None = None
        self.inbox: deque[tuple[float, Any]] = deque()
        self.is_closed = self.is_cut = False

    def put(self, what: object) -> None:
        if self.is_closed or self.is_cut or self.peer.is_closed:
            raise ConnectionResetError("the connection has ended")
        inbox, net = self.peer.inbox, self.net
        at = net.now + net.rng.random() * SLOWEST_S
        inbox.append((max(at, inbox[-1][0]) if inbox else at, what))

    @property
    def is_ready(self) -> bool:
        if self.inbox:
            return self.inbox[0][0] <= self.net.now
        return self.is_cut or self.peer.is_closed

    def take(self) -> Any:
        """What came next. Raises BlockingIOError for nothing, and ConnectionResetError at the end."""
        if not self.is_ready:
            raise BlockingIOError
        if not self.inbox:
            raise ConnectionResetError("end of file")
        return self.inbox.popleft()[1]

    def getpeername(self) -> tuple[str, int]:
        return self.address

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        self.is_closed = True


class Listener:
    def __init__(self, net: Net, address: tuple[str, int], owner: Process) -> None:
        self.net, self.address, self.owner, self.number = net, address, owner, net.fd()
        self.coming: deque[Sock] = deque()
        net.listeners[address] = self

    is_ready = property(lambda self: bool(self.coming))

    def accept(self) -> tuple[Sock, tuple[str, int]]:
        return self.coming.popleft(), ("decode", 0)

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def setblocking(self, flag: bool) -> None: ...

    def fileno(self) -> int:
        return self.number

    def close(self) -> None: ...


class Connection:
    """In place of `transfer.session.connection.Connection`: frames go as they are."""

    holds_back = wants_to_write = False

    def __init__(self, sock: Sock, where: str, clock: Callable[[], float], chaos: object) -> None:
        self.sock, self.where, self._clock = sock, where, clock
        self.last_received_at = clock()

    is_ready = property(lambda self: self.sock.is_ready)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, frame: object) -> None:
        try:
            self.sock.put(frame)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> Iterator[Any]:
        while True:
            try:
                frame = self.sock.take()
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self.last_received_at = self._clock()
            yield frame

    def flush(self) -> None: ...

    def joined(self) -> None: ...

    def writer(self, memory: Memory, shapes: object) -> TcpWriter:
        return TcpWriter(self.sock.net, memory, sock=self.sock)

    def reader(self, memory: Memory, shapes: object) -> TcpReader:
        return TcpReader(self.sock)

    def close(self) -> None:
        self.sock.close()

    def greet(self, key: bytes, hello: object) -> None:
        self.send(hello)

    def enter(self, key: bytes, hello: object, challenge: object) -> None: ...

    def await_greeting(self, key: bytes) -> None: ...

    def admit(self, key: bytes, hello: object, instance: str) -> None:
        self.send(Challenge(protocol=PROTOCOL, instance=instance, nonce=bytes(32)))


class Selector:
    def __init__(self) -> None:
        self._keys: dict[int, SimpleNamespace] = {}

    def register(self, fileobj: Any, events: int, data: object = None) -> None:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = SimpleNamespace(fileobj=fileobj, data=data)

    def modify(self, fileobj: Any, events: int, data: object = None) -> None:
        self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> None:
        del self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def get_map(self) -> dict[int, SimpleNamespace]:
        return self._keys

    def select(self, timeout: float | None) -> list[tuple[SimpleNamespace, int]]:
        return [(key, 1) for key in [*self._keys.values()] if key.fileobj.is_ready]

    def close(self) -> None: ...


class Wake:
    is_ready = False

    def __init__(self, net: Net) -> None:
        self._number = net.fd()

    def fileno(self) -> int:
        return self._number

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Thread:
    """Never runs by itself; what a `Loop` has done beside is done at some later moment."""

    def __init__(self, net: Net, target: Callable[[], None], name: str) -> None:
        self._net, self._target, self._name = net, target, name

    def start(self) -> None:
        if self._name == "transfer":
            self._net.works.append(self._target)

    def is_alive(self) -> bool:
        return True

    def join(self) -> None: ...


# -- bytes ---------------------------------------------------------------------------------------------------------


class Memory(HostMemory):
    """`raw` is what `HostMemory` has, as bytes: [place, byte] by kind and region."""

    def __init__(self, shapes: dict[str, KindShape]) -> None:
        self.shapes = shapes
        self.raw = {
            kind: [np.zeros((shape.num_ids * shape.page_size, size), dtype=np.uint8) for size in shape.bytes_per_place]
            for kind, shape in shapes.items()
        }
        super().__init__(
            {kind: [part.view(f"V{part.shape[1]}").ravel() for part in parts] for kind, parts in self.raw.items()}
        )


@dataclass
class Writer:
    """Prefill's end: reads as late as it may where it `holds_places`, and else at once."""

    net: Net
    memory: Memory
    holds_places: bool = False
    is_lost: bool = False
    closes_at_once: bool = True
    chunk: Chunk | None = None
    begun: tuple[bytes, Piece, Any] | None = None
    data: np.ndarray | None = None

    def begin(self, nonce: bytes, piece: Piece, places: Any) -> None:
        self.begun = nonce, piece, places
        self.holds_places = self.net.rng.random() < 0.5
        self.data = None if self.holds_places else self._gather(piece)

    def _gather(self, piece: Piece) -> np.ndarray:
        return self.memory.gather(piece, self.memory.staging(self.memory.num_bytes(piece))).copy()

    def advance(self) -> Chunk | None:
        if self.net.rng.random() < 0.5:
            return None
        assert self.begun is not None, "nothing was begun"
        nonce, piece, places = self.begun
        data = self._gather(piece) if self.data is None else self.data
        chunk = chunk_of(nonce, piece, len(data), checksum(data.data))
        if self.net.rng.random() < self.net.alter:
            self.net.num_altered += 1
            data = data ^ 1
        self._leave(chunk, piece, places, data)
        self.holds_places = False
        return chunk

    def _leave(self, chunk: Chunk, piece: Piece, places: Any, data: np.ndarray) -> None:
        raise NotImplementedError

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


@dataclass
class TcpWriter(Writer):
    sock: Any = None

    def _leave(self, chunk: Chunk, piece: Piece, places: Any, data: np.ndarray) -> None:
        self.sock.put((chunk, data))

    def close(self) -> None:
        self.sock.close()


class TcpReader:
    def __init__(self, sock: Sock) -> None:
        self.sock = sock
        self._half: tuple[Chunk, np.ndarray] | None = None
        self._parts: list[memoryview] = []

    is_ready = property(lambda self: self._half is not None or self.sock.is_ready)

    def advance(self, target: Callable[[Chunk], list[memoryview]]) -> tuple[Chunk, int, Any] | None:
        if self._half is None:
            try:
                self._half = self.sock.take()
            except BlockingIOError:
                return None
            self._parts = target(self._half[0])
            return None
        (chunk, data), self._half, at = self._half, None, 0
        for part in self._parts:
            part[:] = data[at : at + len(part)].data
            at += len(part)
        return chunk, checksum(data.data), None if self._parts else data

    def divert(self, nonce: bytes) -> None:
        if self._half is not None and self._half[0].nonce == nonce:
            self._parts = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


@dataclass
class Poker(Writer):
    """Reaches into decode's memory by itself: what has begun is written while its process lives, whoever asks for it.
    With the chance `net.slow` a write takes `SLOWEST_WRITE_S`."""

    there: Any = None
    process: Process = field(default_factory=Process)
    closes_at_once: bool = False
    due: float = 0.0

    def begin(self, nonce: bytes, piece: Piece, places: Any) -> None:
        super().begin(nonce, piece, places)
        self.holds_places, self.chunk, self.due = True, None, self.net.now
        if self.net.rng.random() < self.net.slow:
            self.due += SLOWEST_WRITE_S
            self.net.slowed_at.append(self.net.now)
        self.net.works.append(self._write)

    def _write(self) -> None:
        if self.net.now < self.due:
            self.net.works.append(self._write)
        elif self.process.alive:
            self.chunk = super().advance()
            if self.chunk is None:
                self.net.works.append(self._write)

    def advance(self) -> Chunk | None:
        return self.chunk

    def _leave(self, chunk: Chunk, piece: Piece, places: Any, data: np.ndarray) -> None:
        self.there.scatter(piece._replace(places=places), data)


@dataclass
class Reach:
    """`process` is who was let in, once somebody was."""

    invitation: bytes
    process: Process | None = None

    def writer_is_dead(self) -> bool:
        return self.process is not None and not self.process.alive

    def close(self) -> None: ...


@dataclass
class OneSided:
    net: Net
    memory: Memory
    process: Process
    one_machine = True

    def reach(self, pid: int) -> Reach:
        token = self.net.rng.randbytes(8)
        self.net.memories[token] = self.memory
        self.net.reaches.append(Reach(token))
        return self.net.reaches[-1]

    def join(self, address: bytes, page_size: int) -> tuple[Poker, dict[str, KindShape]]:
        there = self.net.memories[address]
        next(reach for reach in self.net.reaches if reach.invitation == address).process = self.process
        return Poker(self.net, self.memory, there=there, process=self.process), there.shapes


@contextmanager
def replaced(net: Net) -> Iterator[None]:
    """Simulated parts in place of sockets, links, selectors, threads and clocks, until the block ends."""
    clock = SimpleNamespace(monotonic=net.clock)
    thread = SimpleNamespace(Thread=lambda *, target, name, daemon: Thread(net, target, name))
    sockets = SimpleNamespace(create_connection=net.connect, socket=object)
    with ExitStack() as stack:

        def put(module: object, **names: object) -> None:
            for name, value in names.items():
                stack.enter_context(patch.object(module, name, value))

        selectors = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1, EVENT_WRITE=2)
        wake = lambda: Wake(net)  # noqa: E731
        put(worker, socket=SimpleNamespace(create_server=net.listen))
        put(connection, selectors=selectors, threading=thread, Wake=wake, time=clock, RunClock=lambda: Clock(net))
        put(waking, Wake=wake)
        put(data_thread, selectors=selectors, threading=thread, Wake=wake, time=clock)
        put(pieces, CHUNK_BYTES=64)
        put(peers, socket=sockets, Connection=Connection, tune=lambda sock: None)
        put(prefill, Connection=Connection, tune=lambda sock: None)
        yield


class Clock:
    def __init__(self, net: Net) -> None:
        self._net = net

    def __call__(self) -> float:
        return self._net.now

    def tick(self) -> None: ...
