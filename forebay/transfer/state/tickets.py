"""Tickets as data: the states of a ticket for each role, and which positions have been received or sent.

A table maps a state and an event to the next state and the actions to carry out, in order. `session` raises the events
and carries out the actions; nothing here does I/O. An event without an entry is an error of the peer's session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

import numpy as np

from forebay.base.errors import OfferError, WireError
from forebay.requests.pieces import KindShape, Piece, PlacesByPosition, extents, pieces
from forebay.requests.transfers import Span

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
A = TypeVar("A", bound=Enum)
Table = Mapping[tuple[S, E], tuple[S, tuple[A, ...]]]


def step(table: Table[S, E, A], state: S, event: E) -> tuple[S, tuple[A, ...]]:
    """Return the next state and the actions of an event. Raises WireError if the table has no entry for it."""
    if (state, event) not in table:
        raise WireError(f"the event {event.name} came for a ticket in state {state.name}")
    return table[state, event]


def _ignored(event: E, *unchanged: S) -> dict[tuple[S, E], tuple[S, tuple[A, ...]]]:
    """Return entries for an event that changes nothing in these states."""
    return {(state, event): (state, ()) for state in unchanged}


# -- decode ------------------------------------------------------------------------------------------------------------


class Received(Enum):
    """State of a ticket on decode."""

    WAITING = auto()  # for a session; nobody else knows of it
    WAITING_LANDED = auto()  # and nothing is due
    OFFERED = auto()
    LANDED = auto()  # every position is there, and the tail is not
    COMPLETED = auto()  # the tail is there, and some position is not
    BROKEN = auto()  # to be closed when nobody can write any more
    CLOSING = auto()  # the data thread has been told to drop it
    CLOSED = auto()


class DecodeEvent(Enum):
    """Event of a ticket on decode."""

    JOINED = auto()  # offers can be made in the session with its peer
    RENEWED = auto()  # the peer has named it in a heartbeat
    LANDED = auto()  # the data thread has every position
    COMPLETED = auto()  # the peer has sent the tail: it writes no more
    FAILED = auto()
    SESSION_LOST = auto()
    UNTOUCHED = auto()  # nobody but this engine writes to its places any more: no writer, a fence, a dead writer
    DROPPED = auto()  # the data thread touches nothing of it any more


class DecodeAction(Enum):
    """Action of decode for a ticket; the reports go to the engine."""

    OFFER = auto()  # to the peer
    ASK = auto()  # the peer whether it has stopped writing
    RENEW = auto()  # the lease
    WITHDRAW = auto()  # what was offered
    DECLINE = auto()  # what was not: the peer would wait for it
    SETTLE = auto()  # tell the peer that everything has arrived
    DROP = auto()  # have the data thread drop it
    REPORT_ARRIVED = auto()
    REPORT_BROKEN = auto()
    REPORT_CLOSED = auto()


_ARRIVE: Final = (DecodeAction.REPORT_ARRIVED, DecodeAction.SETTLE, DecodeAction.DROP)
_BREAK_WAITING: Final = (DecodeAction.REPORT_BROKEN, DecodeAction.DECLINE)
_BREAK_OFFERED: Final = (DecodeAction.REPORT_BROKEN, DecodeAction.WITHDRAW)
_WAITING: Final = (Received.WAITING, Received.WAITING_LANDED)
_OFFERED: Final = (Received.OFFERED, Received.LANDED, Received.COMPLETED)
_ENDED: Final = (Received.BROKEN, Received.CLOSING)

DECODE: Final[Table[Received, DecodeEvent, DecodeAction]] = {
    (Received.WAITING, DecodeEvent.JOINED): (Received.OFFERED, (DecodeAction.OFFER,)),
    (Received.WAITING_LANDED, DecodeEvent.JOINED): (Received.LANDED, (DecodeAction.OFFER,)),
    (Received.BROKEN, DecodeEvent.JOINED): (Received.BROKEN, (DecodeAction.ASK,)),
    **_ignored(DecodeEvent.JOINED, *_OFFERED, Received.CLOSING),
    **{(state, DecodeEvent.RENEWED): (state, (DecodeAction.RENEW,)) for state in _OFFERED},
    **_ignored(DecodeEvent.RENEWED, *_WAITING, *_ENDED),
    (Received.WAITING, DecodeEvent.LANDED): (Received.WAITING_LANDED, ()),
    (Received.OFFERED, DecodeEvent.LANDED): (Received.LANDED, ()),
    (Received.COMPLETED, DecodeEvent.LANDED): (Received.CLOSING, _ARRIVE),
    **_ignored(DecodeEvent.LANDED, *_ENDED),
    (Received.OFFERED, DecodeEvent.COMPLETED): (Received.COMPLETED, ()),
    (Received.LANDED, DecodeEvent.COMPLETED): (Received.CLOSING, _ARRIVE),
    **_ignored(DecodeEvent.COMPLETED, Received.COMPLETED, *_ENDED),
    **{(state, DecodeEvent.FAILED): (Received.BROKEN, _BREAK_WAITING) for state in _WAITING},
    **{(state, DecodeEvent.FAILED): (Received.BROKEN, _BREAK_OFFERED) for state in _OFFERED},
    **_ignored(DecodeEvent.FAILED, *_ENDED),
    **{(state, DecodeEvent.SESSION_LOST): (Received.BROKEN, (DecodeAction.REPORT_BROKEN,)) for state in _OFFERED},
    **_ignored(DecodeEvent.SESSION_LOST, *_WAITING, *_ENDED),
    (Received.BROKEN, DecodeEvent.UNTOUCHED): (Received.CLOSING, (DecodeAction.DROP,)),
    **_ignored(DecodeEvent.UNTOUCHED, *_OFFERED, Received.CLOSING),
    (Received.CLOSING, DecodeEvent.DROPPED): (Received.CLOSED, (DecodeAction.REPORT_CLOSED,)),
}


# -- prefill -----------------------------------------------------------------------------------------------------------


class Shipped(Enum):
    """State of a ticket on prefill."""

    OPEN = auto()
    COMPLETED = auto()  # decode has been told that this was all
    BROKEN = auto()  # being dropped; decode is told when it is
    CLOSING = auto()  # being dropped after it was sent
    CLOSED = auto()


class PrefillEvent(Enum):
    """Event of a ticket on prefill."""

    WRITTEN = auto()  # all of it has left but the tail, which is there
    SETTLED = auto()  # decode has everything
    FAILED = auto()  # here: decode does not know
    PEER_FAILED = auto()  # decode has withdrawn it, or its session is lost
    DROPPED = auto()  # the data thread touches nothing of it any more


class PrefillAction(Enum):
    """Action of prefill for a ticket; the reports go to the engine."""

    COMPLETE = auto()  # send the tail
    WITHDRAW = auto()  # tell decode that it broke
    FENCE = auto()  # tell decode that nothing will be written any more
    DROP = auto()  # have the data thread drop it
    REPORT_SENT = auto()
    REPORT_BROKEN = auto()
    REPORT_CLOSED = auto()


_BREAK: Final = (PrefillAction.REPORT_BROKEN, PrefillAction.WITHDRAW, PrefillAction.DROP)
_BREAK_SILENTLY: Final = (PrefillAction.REPORT_BROKEN, PrefillAction.DROP)
_RUNNING: Final = (Shipped.OPEN, Shipped.COMPLETED)
_DROPPING: Final = (Shipped.BROKEN, Shipped.CLOSING)

PREFILL: Final[Table[Shipped, PrefillEvent, PrefillAction]] = {
    (Shipped.OPEN, PrefillEvent.WRITTEN): (Shipped.COMPLETED, (PrefillAction.COMPLETE,)),
    **_ignored(PrefillEvent.WRITTEN, Shipped.BROKEN),
    (Shipped.COMPLETED, PrefillEvent.SETTLED): (Shipped.CLOSING, (PrefillAction.REPORT_SENT, PrefillAction.DROP)),
    **_ignored(PrefillEvent.SETTLED, Shipped.OPEN, *_DROPPING),
    **{(state, PrefillEvent.FAILED): (Shipped.BROKEN, _BREAK) for state in _RUNNING},
    **_ignored(PrefillEvent.FAILED, *_DROPPING),
    **{(state, PrefillEvent.PEER_FAILED): (Shipped.BROKEN, _BREAK_SILENTLY) for state in _RUNNING},
    **_ignored(PrefillEvent.PEER_FAILED, *_DROPPING),
    (Shipped.BROKEN, PrefillEvent.DROPPED): (Shipped.CLOSED, (PrefillAction.FENCE, PrefillAction.REPORT_CLOSED)),
    (Shipped.CLOSING, PrefillEvent.DROPPED): (Shipped.CLOSED, (PrefillAction.REPORT_CLOSED,)),
}


# -- progress ----------------------------------------------------------------------------------------------------------


class Landing:
    """The places of a sequence, and the positions that have arrived: of every region in order and exactly once."""

    def __init__(self, shapes: Mapping[str, KindShape], spans: Mapping[str, Span], num_tokens: int) -> None:
        self._places = PlacesByPosition(shapes, dict(spans))
        due = extents(shapes, spans, num_tokens)
        self._ends = {kind: end for kind, (_, end) in due.items()}
        self._next = {
            kind: np.full(len(shapes[kind].bytes_per_place), first, dtype=np.int64) for kind, (first, _) in due.items()
        }

    def piece(self, kind: str, region: int, num_regions: int, first: int, end: int) -> Piece:
        """Where that which is due next goes; OfferError for anything else."""
        upcoming = self._next.get(kind)
        if (
            upcoming is None
            or num_regions < 1
            or not 0 <= region <= region + num_regions <= len(upcoming)
            or not first < end <= self._ends[kind]
            or (upcoming[region : region + num_regions] != first).any()
        ):
            raise OfferError(f"{kind} {first}..{end} of regions {region}+{num_regions} is not the expected chunk")
        return Piece(kind, region, num_regions, first, end, self._places(kind, first, end))

    def landed(self, piece: Piece) -> None:
        """Count the positions of a piece as arrived."""
        self._next[piece.kind][piece.region : piece.region + piece.num_regions] = piece.end

    @property
    def is_complete(self) -> bool:
        return all(bool((upcoming >= self._ends[kind]).all()) for kind, upcoming in self._next.items())


@dataclass(slots=True)
class Arrival:
    """A landing and its rate: bytes since the end of its first chunk, whose start time is unknown. `now` in seconds."""

    landing: Landing
    since: float = 0.0
    num_bytes: int = 0

    def add(self, num_bytes: int, now: float) -> None:
        """Count a chunk that ended now."""
        if self.since:
            self.num_bytes += num_bytes
        else:
            self.since = now

    def bytes_per_s(self, now: float) -> float:
        """0 if there was one chunk, or if the clock did not advance between the first and the last."""
        seconds = now - self.since
        return self.num_bytes / seconds if self.num_bytes and seconds > 0 else 0.0


class Departing:
    """The sent part of a sequence: the pieces of every `Send`, in order. `wanted` are the positions of each kind that
    decode has places for."""

    def __init__(self, shapes: Mapping[str, KindShape], wanted: Mapping[str, tuple[int, int]]) -> None:
        self._shapes = shapes
        self._next = {kind: first for kind, (first, _) in wanted.items()}
        self._ends = {kind: end for kind, (_, end) in wanted.items()}

    def send(self, spans: Mapping[str, Span]) -> Sequence[Piece]:
        """OfferError where something between two calls, or before the first, is missing."""
        found: list[Piece] = []
        for kind, span in spans.items():
            self._shapes[kind].check(span, kind)
            first, (begin, room) = self._next[kind], self._shapes[kind].covers(span)
            end = min(room, self._ends[kind])
            if end > first:
                if begin > first:
                    raise OfferError(f"{kind} {first}..{begin} was never sent")
                found += pieces(kind, self._shapes[kind], span, first, end)
                self._next[kind] = end
        return found

    def check_complete(self) -> None:
        """OfferError where something is missing at the end."""
        for kind, upcoming in self._next.items():
            if upcoming < self._ends[kind]:
                raise OfferError(f"{kind} ends at {upcoming} of {self._ends[kind]}, and no more of it comes")
