"""An event loop without waiting: its clock jumps to the next timer, and its connections are made by the simulation."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from tests.simulation.violation import Violation

Connect = Callable[[Callable[[], Any], str, int], Awaitable[tuple[Any, Any]]]


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: as much time as a selector would wait has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Violation("every task waits for something that never comes")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of one simulation. `connect` stands for the network."""

    def __init__(self) -> None:
        self._virtual = _Jumping()
        super().__init__(self._virtual)
        self.connect: Connect | None = None

    def time(self) -> float:
        return self._virtual.now

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        assert self.connect is not None
        return await self.connect(factory, host, port)
