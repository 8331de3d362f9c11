"""Positions of a sequence in regions, compared with a list of its places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.base.errors import OfferError
from forebay.requests import pieces as module
from forebay.requests.pieces import KindShape, PlacesByPosition, chunk_of, extents, pieces
from forebay.requests.transfers import Span

PAGE = 4
PAGES = KindShape(by_token=True, page_size=PAGE, num_ids=10, bytes_per_place=(3, 5, 2))
WINDOW = KindShape(by_token=True, page_size=PAGE, num_ids=10, bytes_per_place=(3,), num_read=6)
STATE = KindShape(by_token=False, page_size=1, num_ids=10, bytes_per_place=(7,))


def span(*ids: int, start: int = 0) -> Span:
    return Span(start=start, ids=np.array(ids, dtype=np.int64))


def places_of(its: Span) -> dict[int, int]:
    """The place of each position that the span's pages have room for."""
    places = [page * PAGE + within for page in its.ids.tolist() for within in range(PAGE)]
    return dict(enumerate(places, its.start))


@pytest.mark.parametrize(
    ("shape", "its", "num_tokens", "extent"),
    [
        (PAGES, span(1, 2, 3), 9, (0, 9)),
        (PAGES, span(2, 3, start=4), 9, (4, 9)),
        (PAGES, span(start=12), 9, (12, 12)),  # all of it is there already
        (WINDOW, span(1, 2, 3), 12, (7, 12)),  # the next token reads itself and five before it
        (WINDOW, span(1, 2, 3), 5, (0, 5)),
        (WINDOW, span(3, start=8), 12, (8, 12)),
        (STATE, span(5), 12, (0, 1)),
    ],
)
def test_extent_is_what_the_token_behind_the_sequence_reads_from_the_span_on(
    shape: KindShape, its: Span, num_tokens: int, extent: tuple[int, int]
) -> None:
    assert shape.extent(its, num_tokens) == extent


@pytest.mark.parametrize("most", [1, 12, 30, 10_000])
@pytest.mark.parametrize("its", [span(3, 7, 1), span(7, 1, 9, start=8)])
def test_pieces_have_each_position_of_each_region_once_within_the_bytes_of_a_chunk(
    monkeypatch: pytest.MonkeyPatch, most: int, its: Span
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", most)
    where, first, end = PlacesByPosition({"kv": PAGES}, {"kv": its}), its.start + 1, its.start + 11
    seen, sizes = [], []
    for piece in pieces("kv", PAGES, its, first, end):
        assert piece.kind == "kv"
        assert piece.places.tolist() == [places_of(its)[at] for at in range(piece.first, piece.end)]
        assert where("kv", piece.first, piece.end).tolist() == piece.places.tolist()
        regions = range(piece.region, piece.region + piece.num_regions)
        seen += [(region, at) for region in regions for at in range(piece.first, piece.end)]
        num_bytes = sum(PAGES.bytes_per_place[region] for region in regions) * len(piece.places)
        assert num_bytes <= most or len(piece.places) == piece.num_regions == 1
        sizes.append(num_bytes)
    assert sorted(seen) == [(region, at) for region in range(3) for at in range(first, end)]
    assert most < 10_000 or sizes == [100]  # as few as there can be
    assert sum(sizes) == 100


def test_pieces_of_a_kind_without_regions_are_none() -> None:
    shape = KindShape(by_token=True, page_size=PAGE, num_ids=10, bytes_per_place=())
    assert list(pieces("kv", shape, span(1), 0, 4)) == []


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ({"kv": span(1, 9, 2), "state": span(4)}, ""),
        ({"kv": span(2, 9, start=4), "state": span(4)}, ""),
        ({"kv": span(0, 1, 2), "state": span(4)}, "kv pages from 0 on, 3 of them, are not of 10 pages of 4"),
        ({"kv": span(1, 10, 2), "state": span(4)}, "kv pages"),
        ({"kv": span(1, -1, 2), "state": span(4)}, "kv pages"),
        ({"kv": span(1, 2, 3, start=-4), "state": span(4)}, "kv pages from -4"),
        ({"kv": span(1, 2, 3, start=2), "state": span(4)}, "kv pages from 2"),
        ({"kv": span(1, 2), "state": span(4)}, "kv pages from 0 on end at 8 of 12"),
        ({"kv": span(1, 2, 3), "state": span(10)}, "state pages"),
        ({"kv": span(1, 2, 3)}, "no places for .'state'."),
        ({"kv": span(1, 2, 3), "state": span(4), "other": span(1)}, "no other cache: .'kv', 'state'."),
    ],
)
def test_extents_of_an_offer_are_of_these_pools_and_have_room_or_it_is_refused(spans: dict[str, Any], why: str) -> None:
    shapes = {"kv": PAGES, "state": STATE}
    if not why:
        assert extents(shapes, spans, 12) == {"kv": (spans["kv"].start, 12), "state": (0, 1)}
        return
    with pytest.raises(OfferError, match=why) as caught:
        extents(shapes, spans, 12)
    assert caught.value.code == "invalid_offer"


def test_spans_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        span(1).ids[0] = 2


def test_chunk_announces_the_positions_and_the_bytes_of_its_piece():
    (piece, *_) = pieces("kv", PAGES, span(1, 2, 3), 2, 9)
    chunk = chunk_of(b"n" * 16, piece, 28, 7)
    assert (chunk.kind, chunk.region, chunk.num_regions) == ("kv", piece.region, piece.num_regions)
    assert (chunk.first, chunk.end, chunk.num_bytes, chunk.checksum) == (2, 9, 28, 7)
