"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from forebay.base.confined import Stop, Stopped, stopped_by
from forebay.base.errors import ForebayError, InvalidRequest, Overloaded
from forebay.base.log import event, get_logger
from forebay.http.lifecycle import ClientGone
from forebay.http.preparation import Client, Lane, Preparation

T = TypeVar("T")


class Workers:
    """A thread for each place of a lane.

    They are daemons: a call that does not end keeps neither the process from ending nor a client from its answer for
    longer than `preparation.MAX_WAIT_S`. Belongs to one event loop.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, client: Client, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `function` on a thread in a turn of the client's, and return or raise its result.

        Raises the errors of `Lane.turn`, and TimeoutError when the function has run for `timeout_s`. If that happens,
        or the client leaves (ClientGone), the processes that work for the call are killed. Code on the thread itself
        cannot be stopped, and keeps its place until it ends.
        """
        turn = await self._lane.turn(client)
        if not self._threads:
            self._start()
        call = _Call(function, partial(asyncio.get_running_loop().call_soon_threadsafe, turn.end))
        call.result.set_running_or_notify_cancel()  # it is not cancelled: its end is that of the work
        self._calls.put(call)
        result = asyncio.wrap_future(call.result)
        try:
            with client.watch.calling(result.cancel):
                return await asyncio.wait_for(result, timeout_s)
        except asyncio.CancelledError:
            if client.watch.gone:
                raise ClientGone from None
            raise
        finally:
            call.stop.set()

    def close(self) -> None:
        """End each thread after the calls that wait."""
        for _ in self._threads:
            self._calls.put(None)

    def _start(self) -> None:
        numbers = range(self._lane.num_places)
        self._threads = [
            threading.Thread(target=self._work, name=f"{self._lane.name}-{i}", daemon=True) for i in numbers
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


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    """One call. `stop` ends the processes that work for it; `ended` is called when it is over, before the result is
    known."""

    function: Callable[[], T]
    ended: Callable[[], object]
    stop: Stop = field(default_factory=Stop)
    result: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        """Call the function."""
        done: Callable[[], None]
        try:
            with stopped_by(self.stop):
                done = partial(self.result.set_result, self.function())
        except BaseException as error:  # the tokenizer's panics are no Exceptions
            done = partial(self.result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.ended()
        done()


INLINE_CHARS: Final = 2048  # tokenizing that much takes less than a millisecond, a hop to a thread and back 0.1
TIMEOUT_S: Final = 30.0  # what is bounded in itself takes that long only on a machine with no time for it
NUM_THREADS: Final = 2  # one long prompt does not hold up everybody else's

log = get_logger("server")


class TextWorkers:
    """Rendering and tokenizing. `TIMEOUT_S` answers the client, but tokenizing cannot be stopped: the thread works on
    until it is done. That is bounded by what it was given. A text has at most 8 bytes per token of context; longer ones
    are refused before any work. Token ids fit into the capped body, and chat templates run in processes that are killed
    (`text.chat_template`).
    """

    def __init__(self, preparation: Preparation) -> None:
        self._workers = Workers(preparation.lane("text", NUM_THREADS))

    async def run(self, client: Client, function: Callable[..., T], *args: Any, size: int, **kwargs: Any) -> T:
        """`function`'s result. `size` is the input's length in characters: short ones run in place, as many as have
        `INLINE_CHARS` together for one client. Whatever fails is InvalidRequest unless it is typed already: the
        tokenizer's own panics are no Exceptions."""
        call = partial(_guarded, function, *args, **kwargs)
        if client.num_inline_chars + size <= INLINE_CHARS:
            client.num_inline_chars += size
            return call()
        try:
            return await self._workers.run(client, call, TIMEOUT_S)
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
    except (ForebayError, Stopped):
        raise
    except BaseException as error:
        log.warning(event("tokenizer_failed", kind=type(error).__name__))
        raise InvalidRequest("the text could not be tokenized: send another one", code="tokenizer_error") from error
