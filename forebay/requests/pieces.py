"""Positions of a sequence as places in regions: the bytes of a chunk, their places, and the missing positions.

A kind of cache has places: of pages one for each token, so that pages of different sizes hold the same ones, of states
one for each slot. All regions of a kind are counted by the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from forebay.base.errors import OfferError
from forebay.base.parts import I64
from forebay.requests.transfers import NONCE_BYTES, Span

CHUNK_BYTES: Final = 16 << 20  # to tell of one costs two threads and a frame: as much as copying 3 MiB


MAX_POSITION: Final = 2**31 - 1  # of a token in a sequence
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Position = Annotated[int, Meta(ge=0, le=MAX_POSITION)]
Count = Annotated[int, Meta(ge=1, le=MAX_POSITION)]
Kind = Annotated[str, Meta(max_length=32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindShape:
    """Shape of the places of a kind: `page_size` of them in a page, and the bytes of a place in each region.
    `by_token`: each is about one token of the sequence; else about all of it. The token behind the sequence reads
    `num_read` of them with its own, and no others are sent, whatever else is in their pages; 0: it reads all."""

    by_token: bool
    page_size: int
    num_ids: int
    bytes_per_place: tuple[int, ...]
    num_read: int = 0

    def extent(self, span: Span, num_tokens: int) -> tuple[int, int]:
        """Return the positions that a sequence of `num_tokens` tokens has from the span's first on."""
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
    """Yield positions [first, end) of all regions of a kind, at most `CHUNK_BYTES` each unless a place is longer."""
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


class PlacesByPosition:
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


class Chunk(msgspec.Struct, frozen=True, tag="chunk", kw_only=True):
    """Positions [first, end) of regions [region, region + num_regions) of a kind, one region after the other:
    `num_bytes` bytes with this checksum (XXH3, 64 bits)."""

    nonce: Nonce
    kind: Kind
    region: Position
    num_regions: Count
    first: Position
    end: Count
    num_bytes: Count
    checksum: Annotated[int, Meta(ge=0)]


def chunk_of(nonce: bytes, piece: Piece, num_bytes: int, checksum: int) -> Chunk:
    """Return the frame that announces a piece of `num_bytes` bytes with this checksum."""
    return Chunk(
        nonce=nonce,
        kind=piece.kind,
        region=piece.region,
        num_regions=piece.num_regions,
        first=piece.first,
        end=piece.end,
        num_bytes=num_bytes,
        checksum=checksum,
    )
