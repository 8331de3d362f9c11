"""The files of a peer on the same machine: which regions are taken, and which numbers are refused (C33)."""

from __future__ import annotations

import mmap

import pytest

from forebay.base.errors import WireError
from forebay.requests.pieces import KindShape
from forebay.transfer.transports import shm

SIZE = mmap.PAGESIZE
SHAPE = KindShape(by_token=True, page_size=4, num_ids=9, bytes_per_place=(8, 2))


def regions(*found: tuple[str, int, int, int]) -> dict[str, KindShape]:
    """The shapes that the peer's regions (kind, file, offset, bytes) make, in one file of `SIZE` bytes."""
    files = shm._Files(regions=[*found])
    places, shapes = shm._regions(files, [mmap.mmap(-1, SIZE)], {"kv": SHAPE}, page_size=2)
    assert {kind: len(of) for kind, of in places.items()} == {"kv": 2}
    return shapes


@pytest.mark.parametrize(
    ("first", "num_ids"),
    [
        (("kv", 0, 0, SIZE), 8),  # as many as the second region has
        (("kv", 0, SIZE - 32, 32), 2),  # up to the end of the file
        (("kv", 0, SIZE, 0), 0),
    ],
)
def test_shm_regions_have_as_many_pages_as_the_smallest(first: tuple[str, int, int, int], num_ids: int) -> None:
    shape = regions(first, ("kv", 0, 0, 32))["kv"]
    assert (shape.num_ids, shape.page_size, shape.bytes_per_place) == (num_ids, 2, (8, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        ("kv", 0, -1, 32),
        ("kv", 0, 0, -1),
        ("kv", 0, SIZE - 31, 32),
        ("kv", 1, 0, 32),
        ("kv", -1, 0, 32),
        ("state", 0, 0, 32),
    ],
)
def test_c33_shm_region_outside_its_file_or_the_layout_is_refused(wrong: tuple[str, int, int, int]) -> None:
    with pytest.raises(WireError, match="region"):
        regions(wrong, ("kv", 0, 0, 32))


@pytest.mark.parametrize("num", [0, 1, 3])
def test_c33_shm_peer_with_fewer_or_more_regions_than_the_layout_is_refused(num: int) -> None:
    with pytest.raises(WireError, match="region"):
        regions(*[("kv", 0, 0, 32)] * num)
