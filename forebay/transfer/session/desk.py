"""Objects that both sides of transfers share: options, clock, links, the mover, and where news go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from forebay.config.engine_config import DisaggregationOptions
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Event
from forebay.requests.updates import Failure
from forebay.transfer.session.connection import Connection
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.guard import Guard
from forebay.transfer.wire.frames import Bounds, Layout
from forebay.transfer.wire.memory import U8, Memory, OneSided

MISSED_BEATS = 3


class ConnectionUser(Protocol):
    """Receiver of a link's events, called by the worker's thread."""

    def on_frame(self, link: Connection, frame: object) -> None: ...

    def on_lost(self, link: Connection, failure: Failure) -> None: ...


@dataclass(kw_only=True, slots=True)
class Desk:
    """`machine` is the same on one machine. `transports` are those that may be used, best first; of all but `tcp`
    `one_sided` has more. `call` has something done by the worker's thread; `emit` may be called by that alone.
    `untaken_s`: how long the oldest news has waited for the engine, 0 where none waits."""

    options: DisaggregationOptions
    instance: str
    layout: Layout
    shapes: dict[str, KindShape]
    memory: Memory
    chunk_bytes: int  # the largest
    transports: list[str]
    one_sided: dict[str, OneSided]
    machine: str
    clock: Callable[[], float]
    data_thread: DataThread
    emit: Callable[[Event], None]
    call: Callable[[Callable[[], None]], None]
    watch: Callable[[Connection, ConnectionUser], None]
    unwatch: Callable[[Connection], None]
    untaken_s: Callable[[], float]
    guard: Guard = field(default_factory=Guard)
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.shapes, self.layout.vocab_size)

    def staging(self) -> U8:
        """For one chunk on its way between memory and a transport."""
        return self.memory.staging(self.chunk_bytes)

    @property
    def silence_s(self) -> float:
        """After this a peer is taken for dead."""
        return MISSED_BEATS * self.options.heartbeat_s

    def beside(self, where: str, work: Callable[[], Callable[[], None]], lose: Callable[[Failure], None]) -> None:
        """Run `work`, which may wait, on a thread of its own, and what it returns on the worker's thread. If either
        raises, call `lose` on the worker's thread, as `Guard.run` does."""

        def run() -> None:
            try:
                then = work()
            except Exception as error:
                self.call(partial(lose, self.guard.reason(where, error)))
            else:
                self.call(lambda: self.guard.run(where, then, lose))

        threading.Thread(target=run, name="transfer", daemon=True).start()
