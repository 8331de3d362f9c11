"""Requests that are being served: how many, for which tenants, and whether their clients are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from starlette.types import Receive

from forebay.base.errors import Unavailable
from forebay.base.room import Room
from forebay.http.security import Tenant


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
            if not self._room.leave(tenant, count):
                self._empty.set()

    def is_full(self, tenant: str) -> bool:
        """Return whether one more request of this tenant would be refused."""
        return not self._room.has_room(tenant, self._limit())

    async def wait_empty(self) -> None:
        """Wait until no request is inside."""
        await self._empty.wait()


class ClientGone(Exception):
    """The client closed its connection; no answer can be sent."""


class Watch:
    """Notices that the client went away, from the end of its body on."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self._then: dict[Callable[[], object], None] = {}
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    def on_gone(self, then: Callable[[], object]) -> None:
        """Call `then` when the client disconnects; at once if it has already."""
        self._then[then] = None
        if self.gone:
            then()

    @contextmanager
    def calling(self, then: Callable[[], object]) -> Iterator[None]:
        """Inside, `then` is called when the client disconnects; at once if it has already."""
        self.on_gone(then)
        try:
            yield
        finally:
            del self._then[then]

    def start(self) -> None:
        """Begin to watch; no-op if it has begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _wait(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for then in [*self._then]:
            then()


class _Known(NamedTuple):
    ids: tuple[str | None, ...]
    abort: Callable[[], None]


class UnderWay:
    """The requests in progress, by tenant: a tenant cannot abort another's requests, whatever the ids. Belongs to the
    event loop."""

    def __init__(self) -> None:
        self._of: dict[str, list[_Known]] = {}

    @contextmanager
    def known(self, tenant: Tenant, ids: tuple[str | None, ...], abort: Callable[[], None]) -> Iterator[None]:
        """As long as it is being answered it can be ended by one of these ids."""
        known = _Known(ids, abort)
        own = self._of.setdefault(tenant.digest, [])
        own.append(known)
        try:
            yield
        finally:
            own.remove(known)
            if not own:
                self._of.pop(tenant.digest, None)

    def abort(self, tenant: Tenant, wanted: str | None) -> int:
        """End those of this tenant that have this id, all of them for None; how many."""
        found = [known for known in self._of.get(tenant.digest, ()) if wanted is None or wanted in known.ids]
        for known in found:
            known.abort()
        return len(found)
