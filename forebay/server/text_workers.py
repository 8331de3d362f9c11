"""Tokenizing and template rendering off the event loop, where neither their time nor their panics can hurt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.base.log import event, get_logger

T = TypeVar("T")
INLINE_CHARS: Final = 2048  # tokenizing that much takes less than a millisecond, a hop to a thread and back 0.1
TIMEOUT_S: Final = 2.0

log = get_logger("server")


class TextWorkers:
    """Two threads: one long prompt does not hold up everybody else's.

    `TIMEOUT_S` answers the client, but a thread cannot be stopped: it works on until it is done. That is bounded by
    what it was given. A text has at most 8 bytes per token of context (longer ones are refused before any work), token
    ids fit into the capped body, and a template is the operator's: it gets at most `MAX_MESSAGES` messages and has
    limits of its own on time and output. Two texts at most are worked on at once, and those that wait count as
    requests inside, of which there is a limit too.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    async def run(self, function: Callable[..., T], *args: Any, size: int, **kwargs: Any) -> T:
        """`function`'s result. `size` is the input's length in characters: short ones run in place. Whatever fails is
        InvalidRequest unless it is typed already: the tokenizer's own panics are no Exceptions."""
        call = partial(_guarded, function, *args, **kwargs)
        if size <= INLINE_CHARS:
            return call()
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> T:
            loop.call_soon_threadsafe(started.set)
            return call()

        future = loop.run_in_executor(self._pool, work)
        try:
            await started.wait()  # the queue's time is not this text's fault
            return await asyncio.wait_for(future, TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"the text took longer than {TIMEOUT_S:g} s to tokenize: send a shorter one", code="tokenizer_timeout"
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _guarded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return function(*args, **kwargs)
    except ForebayError:
        raise
    except BaseException as error:
        log.warning(event("tokenizer_failed", kind=type(error).__name__))
        raise InvalidRequest("the text could not be tokenized: send another one", code="tokenizer_error") from error
