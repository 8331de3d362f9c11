"""Progress of a ticket: which positions have been received by decode, and which have been sent by prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.base.errors import OfferError
from forebay.requests.pieces import KindShape, Piece, Whereabouts, extents, pieces
from forebay.requests.transfers import Span


class Landing:
    """Where a sequence goes, and what of it has come: every region's positions in order and exactly once."""

    def __init__(self, shapes: Mapping[str, KindShape], spans: Mapping[str, Span], num_tokens: int) -> None:
        self._places = Whereabouts(shapes, dict(spans))
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
            raise OfferError(f"{kind} {first}..{end} of regions {region}+{num_regions} is not what was due")
        return Piece(kind, region, num_regions, first, end, self._places(kind, first, end))

    def landed(self, piece: Piece) -> None:
        self._next[piece.kind][piece.region : piece.region + piece.num_regions] = piece.end

    @property
    def is_complete(self) -> bool:
        return all(bool((upcoming >= self._ends[kind]).all()) for kind, upcoming in self._next.items())


@dataclass(slots=True)
class Arrival:
    """A landing and its rate: bytes since the end of its first chunk, whose begin nobody knows. `now` in seconds."""

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
