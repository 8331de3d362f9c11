"""How many requests are in the house, and whether it is closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from forebay.base.errors import Unavailable
from forebay.scheduler.limits import Room


class Lifecycle:
    """The gate in front of tokenization and the engine. Not thread-safe: belongs to the event loop."""

    def __init__(self, limit: Callable[[], int], weights: Mapping[str, int]) -> None:
        """`limit` says how many generations (choices count singly) may be in the system, which tenants share by their
        `weights`."""
        self._limit = limit
        self._room = Room(weights)
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    @property
    def num_inside(self) -> int:
        return self._room.num_inside

    @contextmanager
    def admit(self, tenant: str, count: int) -> Iterator[None]:
        """Hold `count` places. Raises Unavailable while draining, Overloaded when they are not free."""
        if self.draining:
            raise Unavailable("the server is shutting down: send the request to another one", code="draining")
        self._room.check(tenant, self._limit(), count)
        self._room.enter(tenant, count)
        self._empty.clear()
        try:
            yield
        finally:
            self._room.leave(tenant, count)
            if self.num_inside == 0:
                self._empty.set()

    def is_full(self, tenant: str) -> bool:
        """Whether one more request of this tenant would be refused."""
        return not self._room.has_room(tenant, self._limit())

    async def wait_empty(self) -> None:
        await self._empty.wait()
