"""Positions of a sequence as places in regions: which bytes a chunk has, where they lie, what is still missing.

A kind of cache has places: of pages one for each token, so that pages of different sizes hold the same ones, of states
one for each slot. All regions of a kind are counted by the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from forebay.base.errors import EngineError
from forebay.base.parts import I64
from forebay.requests.transfers import Span

CHUNK_BYTES: Final = 16 << 20  # to tell of one costs two threads and a frame: as much as copying 3 MiB


class OfferError(EngineError):
    """Raised if what was offered or sent does not fit together."""

    default_code = "transfer_incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class KindShape:
    """Shape of the places of a kind: `page_size` of them in a page, in every region so many bytes. `by_token`: each is
    about one token of the sequence; else about all of it. The token behind the sequence reads `num_read` of them with
    its own, and no others are sent, whatever else is in their pages; 0: it reads all."""

    by_token: bool
    page_size: int
    num_ids: int
    bytes_per_place: tuple[int, ...]
    num_read: int = 0

    def extent(self, span: Span, num_tokens: int) -> tuple[int, int]:
        """The positions that a sequence of so many tokens has from the span's first on."""
        if not self.by_token:
            return span.start, span.start + len(span.ids)
        first = max(span.start, num_tokens - self.num_read + 1) if self.num_read else span.start
        return first, max(first, num_tokens)

    def places(self, span: Span, first: int, end: int) -> I64:
        """Where positions [first, end) of the sequence lie, [end - first]."""
        pages, within = np.divmod(np.arange(first - span.start, end - span.start), self.page_size)
        places: I64 = span.ids[pages] * self.page_size + within
        return places

    def covers(self, span: Span) -> tuple[int, int]:
        """The positions that a span's pages have room for."""
        return span.start, span.start + len(span.ids) * self.page_size

    def check(self, span: Span, kind: str) -> None:
        """OfferError for ids that are none of this pool's."""
        ids = span.ids
        if (
            span.start < 0
            or span.start % self.page_size
            or (len(ids) and not 0 < ids.min() <= ids.max() < self.num_ids)
        ):
            raise OfferError(
                f"{kind} pages from {span.start} on, {len(ids)} of them, are not of {self.num_ids} pages of "
                f"{self.page_size}",
                code="invalid_offer",
            )


class Piece(NamedTuple):
    """The content of a chunk: positions [first, end) of regions [region, region + num_regions) of a kind, which lie at
    `places` here."""

    kind: str
    region: int
    num_regions: int
    first: int
    end: int
    places: I64


def pieces(kind: str, shape: KindShape, span: Span, first: int, end: int) -> Iterator[Piece]:
    """Positions [first, end) of all regions of a kind, at most `CHUNK_BYTES` each where a place is no longer."""
    sizes = shape.bytes_per_place
    if not sizes:
        return
    step = max(1, CHUNK_BYTES // max(sizes))
    for start in range(first, end, step):
        stop = min(start + step, end)
        places = shape.places(span, start, stop)
        region = 0
        while region < len(sizes):
            num_bytes, until = 0, region
            while until < len(sizes) and (until == region or num_bytes + sizes[until] * len(places) <= CHUNK_BYTES):
                num_bytes += sizes[until] * len(places)
                until += 1
            yield Piece(kind, region, until - region, start, stop, places)
            region = until


class Whereabouts:
    """The places of a sequence's positions; chunks of one region after the other have the same array."""

    def __init__(self, shapes: Mapping[str, KindShape], spans: Mapping[str, Span]) -> None:
        self._shapes, self._spans = shapes, spans
        self._last: dict[str, tuple[int, int, I64]] = {}

    def __call__(self, kind: str, first: int, end: int) -> I64:
        last = self._last.get(kind)
        if last is None or last[:2] != (first, end):
            places = self._shapes[kind].places(self._spans[kind], first, end)
            last = self._last[kind] = first, end, places
        return last[2]


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


def extents(shapes: Mapping[str, KindShape], spans: Mapping[str, Span], num_tokens: int) -> dict[str, tuple[int, int]]:
    """Return the positions to send of each kind. Raises OfferError for places that are none of these pools', or too
    few."""
    found = {}
    for kind, span in spans.items():
        if kind not in shapes:
            raise OfferError(f"there is no {kind} cache: {sorted(shapes)} are", code="invalid_offer")
        shapes[kind].check(span, kind)
        found[kind] = first, end = shapes[kind].extent(span, num_tokens)
        room = shapes[kind].covers(span)[1]
        if room < end:
            raise OfferError(f"{kind} pages from {first} on end at {room} of {end}", code="invalid_offer")
    missing = shapes.keys() - spans.keys()
    if missing:
        raise OfferError(f"no places for {sorted(missing)} were offered", code="invalid_offer")
    return found


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
