"""How many requests are in the house, and whether it is closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.base.errors import Unavailable
from forebay.scheduler.limits import check_count


class Lifecycle:
    """The gate in front of tokenization and the engine. Not thread-safe: belongs to the event loop."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` says how many generations (choices count singly) may be in the system."""
        self._limit = limit
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.num_inside = 0

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold `count` places. Raises Unavailable while draining, Overloaded when they are not free."""
        if self.draining:
            raise Unavailable("the server is shutting down: send the request to another one", code="draining")
        check_count(self.num_inside, self._limit(), count)
        self.num_inside += count
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= count
            if self.num_inside == 0:
                self._empty.set()

    @property
    def full(self) -> bool:
        return self.num_inside >= self._limit()

    async def wait_empty(self) -> None:
        await self._empty.wait()
