"""Positions as places: whatever the pages, every byte has one place on each side, and none is taken for another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.errors import OfferError
from forebay.requests import pieces
from forebay.requests.pieces import KindShape, Piece, extents
from forebay.requests.transfers import Span
from forebay.transfer.state.tickets import Departing, Landing

SIZES = (6, 2_500_000, 10, 4)  # bytes of a place in each region; the second needs chunks of its own


def shape(page_size: int = 4, num_ids: int = 400) -> KindShape:
    return KindShape(by_token=True, page_size=page_size, num_ids=num_ids, bytes_per_place=SIZES)


def span(num_tokens: int, page_size: int, *, start: int = 0, seed: int = 0) -> Span:
    ids = np.random.default_rng(seed).permutation(np.arange(1, 400))[: -(-(num_tokens - start) // page_size)]
    return Span(start=start, ids=ids.astype(np.int64))


@given(
    sizes=st.sampled_from([(1, 1), (1, 16), (16, 1), (4, 16), (16, 4), (8, 8)]),
    num_tokens=st.integers(1, 70),
    cached=st.integers(0, 3),
    steps=st.lists(st.integers(1, 3), max_size=4),
)
def test_every_position_of_every_region_is_sent_once_and_lands_in_its_place(
    sizes: tuple[int, int], num_tokens: int, cached: int, steps: list[int]
) -> None:
    ours, theirs = shape(sizes[0]), shape(sizes[1])
    start = min(cached * 16, (num_tokens - 1) // 16 * 16)
    source, target = span(num_tokens, sizes[0]), span(num_tokens, sizes[1], start=start, seed=1)
    landing = Landing({"kv": theirs}, {"kv": target}, num_tokens)
    departing = Departing({"kv": ours}, extents({"kv": theirs}, {"kv": target}, num_tokens))
    sent: list[Piece] = []
    page = 0
    for step in steps:  # whole pages first
        if (page + step) * sizes[0] <= num_tokens:
            part = Span(start=page * sizes[0], ids=source.ids[page : page + step])
            sent += departing.send({"kv": part})
            page += step
    sent += departing.send({"kv": Span(start=page * sizes[0], ids=source.ids[page:])})
    departing.check_complete()
    seen = np.zeros((len(SIZES), num_tokens), dtype=int)
    for piece in sent:
        assert not landing.is_complete
        regions = slice(piece.region, piece.region + piece.num_regions)
        there = landing.piece(piece.kind, piece.region, piece.num_regions, piece.first, piece.end)
        for i, position in enumerate(range(piece.first, piece.end)):
            assert piece.places[i] == source.ids[position // sizes[0]] * sizes[0] + position % sizes[0]
            here = position - start
            assert there.places[i] == target.ids[here // sizes[1]] * sizes[1] + here % sizes[1]
        seen[regions, piece.first : piece.end] += 1
        num_bytes = sum(SIZES[regions]) * len(piece.places)
        assert num_bytes <= pieces.CHUNK_BYTES or (piece.num_regions == 1 and len(piece.places) == 1)
        landing.landed(there)
    assert landing.is_complete
    assert (seen[:, start:] == 1).all()
    assert not seen[:, :start].any()


def test_what_is_not_due_is_refused() -> None:
    """Twice, out of order, of no region, beyond the end."""
    landing = Landing({"kv": shape()}, {"kv": span(9, 4)}, 9)
    landing.landed(landing.piece("kv", 0, 2, 0, 4))
    for wrong in [(0, 1, 0, 4), (2, 1, 4, 8), (0, 2, 4, 10), (0, 5, 4, 8), (-1, 1, 0, 4), (0, 0, 4, 8), (0, 1, 4, 4)]:
        with pytest.raises(OfferError):
            landing.piece("kv", *wrong)
    with pytest.raises(OfferError):
        landing.piece("window", 0, 1, 0, 4)
    landing.piece("kv", 2, 2, 0, 4)


def test_a_gap_is_found_by_the_sender() -> None:
    departing = Departing({"kv": shape()}, {"kv": (0, 9)})
    with pytest.raises(OfferError, match=r"0\.\.4 was never sent"):
        departing.send({"kv": Span(start=4, ids=np.array([5, 6]))})
    departing.send({"kv": Span(start=0, ids=np.array([5, 6]))})
    with pytest.raises(OfferError, match="ends at 8 of 9"):
        departing.check_complete()


@pytest.mark.parametrize(
    "offered",
    [
        Span(start=0, ids=np.array([1, 2])),
        Span(start=0, ids=np.array([1, 2, 400])),
        Span(start=0, ids=np.array([1, 0, 2])),
        Span(start=0, ids=np.array([1, -1, 2])),
        Span(start=2, ids=np.array([1, 2, 3])),
    ],
    ids=["few", "beyond", "padding", "negative", "start"],
)
def test_places_that_are_none_of_the_pool_are_refused(offered: Span) -> None:
    """G-4"""
    with pytest.raises(OfferError):
        extents({"kv": shape()}, {"kv": offered}, 9)


def test_kinds_that_are_missing_or_unknown_are_refused() -> None:
    shapes = {"kv": shape(), "state": replace(shape(1), by_token=False)}
    both = {"kv": span(9, 4), "state": Span(start=0, ids=np.array([3]))}
    assert extents(shapes, both, 9) == {"kv": (0, 9), "state": (0, 1)}
    for wrong in ({"kv": both["kv"]}, both | {"window": both["kv"]}):
        with pytest.raises(OfferError):
            extents(shapes, wrong, 9)
