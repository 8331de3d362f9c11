"""Threads for what the event loop has no time for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from forebay.base.errors import Overloaded

T = TypeVar("T")

MAX_WAITING: Final = 512  # calls, for a free thread
MAX_WAIT_S: Final = 30.0  # of one of them


class Workers:
    """`num_threads` threads and a queue of limited length in front of them.

    They are daemons: a call that does not end keeps neither the process from ending nor, for longer than `MAX_WAIT_S`,
    a client from its answer. Belongs to one event loop.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int = MAX_WAITING) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `function` on a thread, and return or raise its result. Raises Overloaded where no thread comes free, and
        TimeoutError when it has run for `timeout_s`; it is then left to itself."""
        if self._calls.qsize() >= self._max_waiting:
            raise Overloaded(f"{self._calls.qsize()} requests wait for a free {self._name} worker: try again later")
        self._start()
        call = _Call(function)
        self._calls.put(call)
        try:
            await asyncio.wait_for(asyncio.shield(call.started), MAX_WAIT_S)  # the queue's time is not this call's
        except TimeoutError:
            raise Overloaded(f"no {self._name} worker came free within {MAX_WAIT_S:g} s: try again later") from None
        finally:
            call.dropped = not call.started.done()
        return await asyncio.wait_for(call.result, timeout_s)

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _start(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """In a frame of its own: what the last call was given and has made goes before the next one comes."""
        call = self._calls.get()
        if call is not None:
            call.run()
        return call is not None


class _Call(Generic[T]):
    """One call, made in the event loop that waits for it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.result: asyncio.Future[T] = self._loop.create_future()
        self.dropped = False  # nobody waits for it any more

    def run(self) -> None:
        if self.dropped:
            return
        self._tell(_settle, self.started, None)
        try:
            value = self._function()
        except BaseException as error:  # the tokenizer's panics are no Exceptions
            self._tell(_fail, self.result, error)
        else:
            self._tell(_settle, self.result, value)

    def _tell(self, settle: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(settle, *args)


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
