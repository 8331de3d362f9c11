"""Prefill's records of a connection, of a decode engine, and of a ticket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Span, Tail, Ticket
from forebay.transfer.session.connection import Connection
from forebay.transfer.state.tickets import Departing
from forebay.transfer.wire import frames


class Stage(Enum):
    OPEN = auto()
    COMPLETED = auto()  # decode has been told that this was all
    BROKEN = auto()  # being dropped; decode is told when it is
    CLOSING = auto()  # being dropped after it was sent


@dataclass(slots=True)
class Session:
    """A decode engine; `number` is the mover's name for it, `shapes` are those of its caches."""

    link: Connection
    hello: frames.Hello
    number: int
    transport: str
    shapes: dict[str, KindShape]
    page_size: int
    since: float
    is_joined: bool = False
    beat_at: float = 0.0

    @property
    def where(self) -> str:
        return f"decode engine {self.hello.instance[:8]} at {self.link.where}"


@dataclass(slots=True)
class Shipment:
    """A ticket as prefill has it. `unwritten` pieces are the mover's; `moved_at` is when it last went on."""

    ticket: Ticket
    session: Session
    places: dict[str, Span]
    departing: Departing
    moved_at: float
    stage: Stage = Stage.OPEN
    unwritten: int = 0
    tail: Tail | None = None


@dataclass(slots=True)
class Guest:
    """A connection that is no session yet."""

    since: float
    hello: frames.Hello | None = None
