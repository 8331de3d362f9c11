"""Tokenizing off the event loop, where neither its time nor its panics can hurt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from forebay.base.errors import ForebayError, InvalidRequest, Overloaded
from forebay.base.log import event, get_logger
from forebay.server.http.workers import Workers

T = TypeVar("T")
INLINE_CHARS: Final = 2048  # tokenizing that much takes less than a millisecond, a hop to a thread and back 0.1
TIMEOUT_S: Final = 30.0  # what is bounded in itself takes that long only on a machine with no time for it
NUM_THREADS: Final = 2  # one long prompt does not hold up everybody else's

log = get_logger("server")


class TextWorkers:
    """`TIMEOUT_S` answers the client, but a thread cannot be stopped: it works on until it is done. That is bounded by
    what it was given. A text has at most 8 bytes per token of context (longer ones are refused before any work), token
    ids fit into the capped body, and chat templates run in processes that are killed (`text.template_process`). What
    waits for a free thread is limited in number and in time.
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
        self._workers.close()


def _guarded(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return function(*args, **kwargs)
    except ForebayError:
        raise
    except BaseException as error:
        log.warning(event("tokenizer_failed", kind=type(error).__name__))
        raise InvalidRequest("the text could not be tokenized: send another one", code="tokenizer_error") from error
