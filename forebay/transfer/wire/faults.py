"""Faults on purpose: the changes that `--chaos` makes to the frames and chunks of an engine.

A frame that is lost, duplicated, late or altered is found by its number or its HMAC: the session ends, with all of its
tickets. An altered chunk is found by its checksum, and only its ticket breaks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from forebay.config.engine_config import Chaos

Message = Sequence[memoryview]
"""In parts, one behind the other."""


class Faults:
    """Injected faults of messages; without any configured, each message passes at once and unchanged."""

    def __init__(self, chaos: Chaos, clock: Callable[[], float]) -> None:
        self._chaos, self._clock = chaos, clock
        self._is_idle = not any((chaos.drop, chaos.double, chaos.reorder, chaos.alter))
        self._random = random.Random()
        self._late: list[Message] = []  # to leave behind the next
        self._held: deque[tuple[float, bytes]] = deque()

    def put(self, data: bytes) -> None:
        """Take a message that is to leave; `due` yields what leaves of it, and when."""
        for message in self.spoil([memoryview(data)]):
            self._held.append((self._clock() + self._chaos.delay_s, b"".join(message)))

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def due(self) -> Iterator[bytes]:
        """Yield the messages whose delay is over."""
        now = self._clock()
        while self._held and self._held[0][0] <= now:
            yield self._held.popleft()[1]

    def spoil(self, message: Message) -> list[Message]:
        """Return the messages that leave in place of this one."""
        if self._is_idle:
            return [message]
        if self.loses():
            return []
        if self.alters():
            message = self._altered(message)
        if not self._late and self._happens(self._chaos.reorder):
            self._late = [[memoryview(bytes(part)) for part in message]]  # its places are somebody else's by then
            return []
        late, self._late = self._late, []
        return [message, *late, *([message] if self._happens(self._chaos.double) else [])]

    def loses(self) -> bool:
        """Draw whether the next message is lost."""
        return self._happens(self._chaos.drop)

    def alters(self) -> bool:
        """Draw whether the next message is altered."""
        return self._happens(self._chaos.alter)

    def _happens(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def _altered(self, message: Message) -> Message:
        """One bit, in one part."""
        which = self._random.randrange(len(message))
        part = bytearray(message[which])
        part[self._random.randrange(len(part))] ^= 1 << self._random.randrange(8)
        return [*message[:which], memoryview(part), *message[which + 1 :]]
