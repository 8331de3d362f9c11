"""Processes of our own for work on untrusted input: with little memory, ended by the kernel after too much CPU time.

Questions and answers are bytes behind their length, over a socket pair, one after the other.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from forebay.base import child
from forebay.base.errors import Unavailable

_LENGTH: Final = struct.Struct(">I")
_BLOCK_BYTES: Final = 1 << 16
_END_S: Final = 1.0


class Limits(NamedTuple):
    """Resource limits of a confined process, and of one answer from it."""

    cpu_s: float  # of the processor's time, for each answer
    memory_bytes: int  # of data, the interpreter's own included
    answer_bytes: int  # more than any answer has


class NoAnswer(Exception):
    """The reason: the continuation of a sentence that begins with the question."""


class Late(NoAnswer):
    """By the clock, which says nothing of the question: the machine may be busy."""


class ConfinedProcess:
    """One that has just been started. Its holder calls `end`."""

    def __init__(self, module: str, limits: Limits, work: str) -> None:
        """`module` is one that runs `serve`, its argument the socket to read. Raises Unavailable, which names the
        `work`, if no process can be started."""
        self._limits = limits
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._child = child.start(
                    ["-P", "-m", module, str(theirs.fileno())],
                    descriptors=[theirs.fileno()],
                    label=module.rpartition(".")[2],
                )
        except OSError as error:
            self._sock.close()
            raise Unavailable(f"the process for {work} cannot be started ({error.strerror})") from error

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def exchange(self, question: bytes, timeout_s: float) -> bytes:
        """The answer. Raises NoAnswer, or Late; the process has then ended."""
        deadline = time.monotonic() + timeout_s
        try:
            self._sock.settimeout(timeout_s)
            _send(self._sock, question)
            answer = _receive(self._sock, deadline, self._limits.answer_bytes)
        except TimeoutError:
            self.end()
            raise Late(f"gave no answer in {timeout_s:g} s") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._obituary()
        return answer

    def kill(self) -> None:
        """Have the process end soon. Any thread may call this: the socket is left to the thread that reads it."""
        self._child.kill()

    def end(self) -> None:
        """Nothing if it has ended."""
        self._sock.close()
        self._child.kill()
        self._child.wait()

    def _obituary(self) -> NoAnswer:
        try:
            status = self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        if status == -signal.SIGPROF:
            return NoAnswer(f"took longer than {self._limits.cpu_s:g} s")
        return NoAnswer(f"needed more than {self._limits.memory_bytes >> 20} MiB, or crashed (exit status {status})")


class Endable(Protocol):
    """A process that its owner can stop at any time."""

    @property
    def has_ended(self) -> bool: ...

    def kill(self) -> None:
        """Have the process end soon. Any thread may call this; the thread that uses the process sees its end."""

    def end(self) -> None:
        """Stop the process; no-op if it has stopped already."""


class Stopped(Exception):
    """No caller waits for the result any more: the process that worked for it was ended."""


class Stop:
    """Ends the processes that work for one call once no client waits for its result. Thread-safe.

    A process is used deep below functions that need not know of clients. A thread therefore names the stop of its call
    in a context variable (`stopped_by`), and `Processes` reads it there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Endable | None = None
        self._is_set = False

    def set(self) -> None:
        """End the process that works now, and let no other begin."""
        with self._lock:
            self._is_set = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def ending(self, process: Endable) -> Iterator[None]:
        """Inside, `set` ends the process. Raises Stopped at the beginning or at the end if it was called."""
        with self._lock:
            if self._is_set:
                raise Stopped
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None
                if self._is_set:
                    raise Stopped


_stop: ContextVar[Stop] = ContextVar("stop")


@contextlib.contextmanager
def stopped_by(stop: Stop) -> Iterator[None]:
    """Inside, `stop` ends the processes that this thread uses."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


P = TypeVar("P", bound=Endable)


class Processes(Generic[P]):
    """Started when they are needed, one for each thread that asks at the same time, and kept until this is forgotten.
    Thread-safe."""

    def __init__(self, start: Callable[[], P]) -> None:
        """`start` refers to nothing that refers to this."""
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[P] = []
        self.living: set[P] = set()
        weakref.finalize(self, _end_all, self.living)

    @contextlib.contextmanager
    def one(self) -> Iterator[P]:
        """Return a process for the caller alone. It is kept unless it has ended. Raises as `start` does, and Stopped
        once no client waits for the result of this thread (`stopped_by`)."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None and idle.has_ended:
            self._drop(idle)
            idle = None
        process = idle or self._new()
        try:
            with _stop.get(Stop()).ending(process):
                yield process
        except BaseException:
            self._drop(process)  # which question it answers next is not known
            raise
        if process.has_ended:
            self._drop(process)
            return
        with self._lock:
            self._idle.append(process)

    def _new(self) -> P:
        process = self._start()
        self.living.add(process)
        return process

    def _drop(self, process: P) -> None:
        process.end()
        self.living.discard(process)


def _end_all(processes: set[P]) -> None:
    for process in list(processes):
        process.end()


def serve(fd: int, limits: Limits, answer: Callable[[bytes], bytes]) -> None:
    """In such a process: answer until the other end is closed. `fd` is its end of the socket pair."""
    _limit_memory(limits.memory_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=fd) as sock:
        while (question := _receive(sock)) is not None:
            # Of the processor's time, not the clock's: the machine may be busy. What SIGPROF does is end the process,
            # in the middle of whatever it is doing.
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            written = answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(sock, written)


def _limit_memory(num_bytes: int) -> None:
    """Limit written memory, not address space: some systems' archive of all languages alone takes 220 MB of that
    in every process that has set a locale."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if most == resource.RLIM_INFINITY else min(most, num_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _send(sock: socket.socket, content: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(content)) + content)


def _receive(sock: socket.socket, deadline: float | None = None, most: int | None = None) -> bytes | None:
    """None where the other side has ended, or announces more than `most` bytes. Raises TimeoutError."""
    head = _read(sock, _LENGTH.size, deadline)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    return _read(sock, size, deadline) if most is None or size <= most else None


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        block = sock.recv(min(_BLOCK_BYTES, size - len(content)))
        if not block:
            return None
        content += block
    return bytes(content)
