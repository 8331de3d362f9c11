"""One request's updates, from the channel to the reader of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from forebay.base.errors import EngineError, ForebayError
from forebay.requests.updates import Failure, FinishReason, Update

MAX_PENDING: Final = 1 << 16  # tokens and reported alternatives a consumer may lag behind, a few MB at most


class Receiver(Protocol):
    """Takes one request's updates in the turn of the event loop in which they arrive, without a task. Must not
    raise."""

    def tokens(self, token_ids: list[int]) -> None:
        """Take an update of tokens alone, the most common one by far."""

    def update(self, update: Update) -> None:
        """Take in one update of the request; the last one carries `finish`."""


class Mailbox:
    """The engine's side: the updates that have arrived and were not read yet, merged into at most one. With a
    `Receiver` nothing waits here.

    A consumer that falls behind gets fewer, longer updates; one that falls behind by more than `MAX_PENDING` tokens
    (alternatives of log-probabilities count as tokens) is cut off with a failure of code `slow_consumer`.
    """

    __slots__ = ("_receiver", "_size", "_waiter", "closed", "pending", "request_id", "tenant")

    def __init__(self, request_id: int, tenant: str = "") -> None:
        self.request_id, self.tenant = request_id, tenant
        self.pending: Update | None = None
        self.closed = False  # the last update has been put
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._receiver: Receiver | None = None

    def put_tokens(self, token_ids: list[int]) -> bool:
        """As `put` of an update that has these tokens and nothing else."""
        if self._receiver is None:
            return self.put(Update(self.request_id, token_ids))
        self._receiver.tokens(token_ids)
        return True

    def put(self, update: Update) -> bool:
        """Add an update; False if that was too much for this consumer, which has then been given its failure."""
        if self.closed:
            return True
        if self._receiver is not None:
            self._hand_over(update)
            return True
        self._size += _size(update)
        # One update alone is never too much: the log-probabilities of a long prompt come whole.
        fits = self.pending is None or self._size <= MAX_PENDING
        if not fits:
            lag = f"{self._size} tokens were waiting to be read; at most {MAX_PENDING} are kept"
            update = failed(self.request_id, EngineError(f"the stream was cut: {lag}", code="slow_consumer"))
            self.pending = None
        self.pending = update if self.pending is None else merge(self.pending, update)
        self.closed = update.finish is not None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return fits

    def deliver(self, receiver: Receiver) -> None:
        """Pass the pending update, and from now on all later ones, to `receiver`."""
        self._receiver = receiver
        update, self.pending, self._size = self.pending, None, 0
        if update is not None:
            self._hand_over(update)

    def _hand_over(self, update: Update) -> None:
        assert self._receiver is not None
        receiver, self.closed = self._receiver, update.finish is not None
        if self.closed:
            self._receiver = None  # it may know the stream that knows this mailbox: no need to wait for the collector
        receiver.update(update)

    async def take(self) -> Update:
        """The next update; one consumer at a time."""
        while self.pending is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        update, self.pending, self._size = self.pending, None, 0
        return update


class Stream:
    """The updates of one request, to be iterated once, by one task, or to be delivered.

    Exactly one update, the last, has `finish`, and every stream gets it: if the engine dies it is an `ERROR` with a
    `Failure` of code `engine_dead`. Updates that arrive faster than they are taken are merged. Leaving the iteration
    early, cancelling it, `aclose`, leaving `async with`, or dropping the stream aborts the request.
    """

    def __init__(self, mailbox: Mailbox, abort: Callable[[int], None]) -> None:
        """`abort` is called with the request's id in the running loop's thread."""
        self.request_id = mailbox.request_id
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox
        self._abort = abort
        self._aborted = False
        self._ended = False

    def abort(self) -> None:
        """Ask the engine to stop; the stream then ends with what it answers (`ABORT`, or the end that came first).
        Does nothing when the request has ended, or the second time."""
        if not self._aborted and not self._mailbox.closed:
            self._aborted = True
            self._abort(self.request_id)

    def deliver(self, receiver: Receiver) -> None:
        """Instead of an iteration: every update goes to `receiver` as it arrives. Only `abort`, `aclose` and dropping
        the stream end it early then."""
        self._mailbox.deliver(receiver)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update:
        if self._ended:
            raise StopAsyncIteration
        try:
            update = await self._mailbox.take()
        except asyncio.CancelledError:
            self.abort()
            raise
        self._ended = update.finish is not None
        return update

    async def aclose(self) -> None:
        """End the iteration, and the request with it if it still runs."""
        self._ended = True
        self.abort()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The collector may run this in any thread, and after the loop.
        if not self._aborted and not self._mailbox.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, self.request_id)


def failed(request_id: int, error: ForebayError) -> Update:
    """The last update of a request that failed."""
    return Update(request_id=request_id, token_ids=[], finish=FinishReason.ERROR, failure=Failure.of(error))


def merge(first: Update, then: Update) -> Update:
    """Merge both into `first`; if `then` has restarted, the tokens before are dropped."""
    if then.restarted:
        first.token_ids, first.cache, first.logprobs, first.prompt_logprobs = [], None, None, None
        first.restarted = True
    first.token_ids += then.token_ids
    first.finish = then.finish
    first.failure = then.failure
    first.matched_stop = then.matched_stop
    first.speculation = then.speculation
    first.num_partly_accepted = then.num_partly_accepted
    first.vector = then.vector
    first.memory, first.history = then.memory, then.history
    if then.cache is not None:
        first.cache, first.weight_version = then.cache, then.weight_version
    if then.logprobs is not None:
        first.logprobs = first.logprobs or []
        first.logprobs += then.logprobs
    if then.prompt_logprobs is not None:
        first.prompt_logprobs = then.prompt_logprobs
    return first


def _size(update: Update) -> int:
    size = len(update.token_ids)
    for logprobs in (update.logprobs, update.prompt_logprobs):
        size += sum(1 + len(entry.top_ids) for entry in logprobs or () if entry is not None)
    return size
