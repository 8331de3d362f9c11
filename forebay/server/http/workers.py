"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from forebay.base.errors import ForebayError, InvalidRequest, Overloaded
from forebay.base.log import event, get_logger

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
        if not self._threads:
            self._start()
        call = _Call(function)
        self._calls.put(call)
        try:
            await asyncio.wait_for(asyncio.wrap_future(call.started), MAX_WAIT_S)  # the queue's time is not this call's
        except TimeoutError:
            raise Overloaded(f"no {self._name} worker came free within {MAX_WAIT_S:g} s: try again later") from None
        return await asyncio.wait_for(asyncio.wrap_future(call.result), timeout_s)

    def close(self) -> None:
        """End each thread after the calls that wait."""
        for _ in self._threads:
            self._calls.put(None)

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True) for i in range(self._num_threads)
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


@dataclass(slots=True)
class _Call(Generic[T]):
    """One call. Its futures are cancelled with the tasks that wait for them."""

    function: Callable[[], T]
    started: Future[None] = field(default_factory=Future)
    result: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function, unless no task waits for the start any more."""
        if not self.started.set_running_or_notify_cancel():
            return
        self.result.set_running_or_notify_cancel()  # from now on it is not cancelled
        self.started.set_result(None)
        try:
            self.result.set_result(self.function())
        except BaseException as error:  # the tokenizer's panics are no Exceptions
            self.result.set_exception(error)


INLINE_CHARS: Final = 2048  # tokenizing that much takes less than a millisecond, a hop to a thread and back 0.1
TIMEOUT_S: Final = 30.0  # what is bounded in itself takes that long only on a machine with no time for it
NUM_THREADS: Final = 2  # one long prompt does not hold up everybody else's

log = get_logger("server")


class TextWorkers:
    """`TIMEOUT_S` answers the client, but a thread cannot be stopped: it works on until it is done. That is bounded by
    what it was given. A text has at most 8 bytes per token of context; longer ones are refused before any work. Token
    ids fit into the capped body, and chat templates run in processes that are killed (`text.chat_template`). What waits
    for a free thread is limited in number and in time.
    """

    def __init__(self) -> None:
        self._workers = Workers("text", NUM_THREADS)

    async def run(self, function: Callable[..., T], *args: Any, size: int, **kwargs: Any) -> T:
        """`function`'s result. `size` is the input's length in characters: short ones run in place. Whatever fails is
        InvalidRequest unless it is typed already: the tokenizer's own panics are no Exceptions."""
        call = partial(_guarded, function, *args, **kwargs)
        if size <= INLINE_CHARS:
            return call()
        try:
            return await self._workers.run(call, TIMEOUT_S)
        except TimeoutError:
            raise Overloaded(
                f"the text was not rendered and tokenized within {TIMEOUT_S:g} s: the server is busy, try again later",
                code="tokenizer_timeout",
            ) from None

    def close(self) -> None:
        """End each thread after the calls that wait."""
        self._workers.close()


def _guarded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return function(*args, **kwargs)
    except ForebayError:
        raise
    except BaseException as error:
        log.warning(event("tokenizer_failed", kind=type(error).__name__))
        raise InvalidRequest("the text could not be tokenized: send another one", code="tokenizer_error") from error
