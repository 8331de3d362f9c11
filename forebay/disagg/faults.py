"""Faults on purpose: what `--chaos` makes of the frames that an engine sends."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

from forebay.config.engine_config import Chaos


class Faults:
    """What goes in comes out: all of it and at once where nothing is asked for. A frame that is lost or comes late is
    found by its number: the session ends, and with it every ticket it had."""

    def __init__(self, chaos: Chaos, clock: Callable[[], float]) -> None:
        self._chaos, self._clock = chaos, clock
        self._random = random.Random()
        self._held: deque[tuple[float, bytes]] = deque()

    def put(self, data: bytes) -> None:
        if not self._chaos.drop or self._random.random() >= self._chaos.drop:
            self._held.append((self._clock() + self._chaos.delay_s, data))

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def due(self) -> Iterator[bytes]:
        now = self._clock()
        while self._held and self._held[0][0] <= now:
            yield self._held.popleft()[1]
