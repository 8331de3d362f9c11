"""Detection of clients that have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class Watch:
    """Notices that the client went away, from the end of its body on."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._then: Callable[[], None] | None = None
        self.gone = False

    def on_gone(self, then: Callable[[], None]) -> None:
        self._then = then
        if self.gone:
            then()

    def __enter__(self) -> Watch:
        self._task = asyncio.create_task(self._wait())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._then is not None:
            self._then()
