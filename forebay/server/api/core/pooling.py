"""The prompts of one HTTP request behind which nothing is generated: sent, some at a time, and what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.base.errors import Unavailable
from forebay.engine.stream import Stream
from forebay.http.errors import from_failure
from forebay.requests.updates import CacheReport, FinishReason, Update

Submit = Callable[[list[int]], Stream]


class Vector(NamedTuple):
    """The vector or scores of one prompt, as raw bytes, with what the caches gave."""

    data: bytes  # as `Update.vector`
    cache: CacheReport
    weight_version: int


class Batch:
    """Prompts that are pooled together. The batch ends with its last prompt or first failure; its owner aborts it then.
    Belongs to the event loop."""

    def __init__(self, submit: Submit, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts
        self.vectors: dict[int, Vector] = {}  # by the place of the prompt
        self.error: Exception | None = None
        self.aborted = False
        self.started_at = time.monotonic()
        self._submit = submit
        self._next = 0
        self._live: dict[int, Stream] = {}
        self._ended = asyncio.Event()

    def start(self, most: int) -> None:
        """Submit the first `most` prompts; each that ends submits the next one. Raises the engine's error."""
        for _ in range(min(most, len(self.prompts))):
            self._send()

    def _send(self) -> None:
        place = self._next
        self._next += 1
        self._live[place] = stream = self._submit(self.prompts[place])
        stream.deliver(_Taker(self, place))

    def take(self, place: int, update: Update) -> None:
        """The one update of a prompt."""
        if self._live.pop(place, None) is None:
            return  # it was given up
        match update.finish:
            case FinishReason.ERROR:
                self._fail(from_failure(update.failure))
            case FinishReason.ABORT:
                self._fail(Unavailable("the engine ended this request: send it again", code="aborted"))
            case _:
                self.vectors[place] = Vector(update.vector, update.cache or CacheReport(), update.weight_version)
                if len(self.vectors) == len(self.prompts):
                    self._ended.set()
                else:  # this one counts until all of its frame has been delivered
                    asyncio.get_running_loop().call_soon(self._submit_next)

    def _submit_next(self) -> None:
        if self._next < len(self.prompts) and not self._ended.is_set():
            try:
                self._send()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._ended.set()

    def abort(self) -> None:
        """Abort the prompts in progress and release the waiter."""
        live, self._live = self._live, {}
        for stream in live.values():
            stream.abort()
        self._ended.set()

    def leave(self) -> None:
        """Note that the client is gone, and end all prompts that are under way."""
        self.aborted = True
        self.abort()

    async def ended(self) -> list[Vector]:
        """Return the result of each prompt, in order. Raises the first failure."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        return [self.vectors[place] for place in sorted(self.vectors)]


class _Taker:
    """A prompt's `Receiver`."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: Batch, place: int) -> None:
        self._batch, self._place = batch, place

    def tokens(self, token_ids: list[int]) -> None:
        raise AssertionError(f"a prompt that is pooled was followed by {token_ids}")

    def update(self, update: Update) -> None:
        self._batch.take(self._place, update)
