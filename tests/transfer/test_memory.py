"""Bytes by place: copied by runs or through a buffer, they and their checksum are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.engine_config import CacheTypes
from forebay.pools.cache_pool import CachePool
from forebay.requests.pieces import pieces
from forebay.requests.transfers import Span
from forebay.transfer.wire import memory
from forebay.transfer.wire.memory import DeviceMemory, HostMemory, checksum, chunk_bytes, runs, shapes_of
from tests.transfer import shared_gpu
from tests.transfer.pair import EIGHT_BITS, EVERYTHING, NUM_SLOTS


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12))
def test_runs_are_the_places_with_neighbours_merged(places: list[tuple[int, int]]) -> None:
    both = [np.array(some, dtype=np.int64) for some in zip(*places, strict=True)]
    found = runs(*both)
    for some in both:
        assert [int(some[begin]) + i for begin, end in found for i in range(end - begin)] == some.tolist()
    ends = [end for _, end in found]
    assert ends == sorted(set(ends))
    assert not any(all(some[end] == some[end - 1] + 1 for some in both) for end in ends[:-1])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[DeviceMemory]:
    """A GPU's memory, whose tensors are on the CPU."""
    shared_gpu.install_streams(monkeypatch)
    return DeviceMemory


@pytest.mark.parametrize("run_bytes", [0, 64, 1 << 30, "device"], ids=["runs", "either", "buffer", "device"])
@pytest.mark.parametrize("types", [CacheTypes(), EIGHT_BITS], ids=["float32", "int8"])
def test_every_way_to_copy_does_the_same(
    run_bytes: int | str, types: CacheTypes, monkeypatch: pytest.MonkeyPatch, device: type[DeviceMemory]
) -> None:
    monkeypatch.setattr(memory, "RUN_BYTES", 1 << 30 if run_bytes == "device" else run_bytes)
    caches = [CachePool(EVERYTHING, types, page_size=4, num_slots=NUM_SLOTS, device="cpu") for _ in range(3)]
    for table in caches[0].tables.values():
        for tensor in table.tensors:
            tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    shapes = shapes_of(caches[0])
    make = device.of if run_bytes == "device" else HostMemory.of
    source, target, buffered = (make(cache, shapes) for cache in caches)
    staging = target.staging(chunk_bytes(shapes))
    for kind, shape in shapes.items():
        here = Span(start=0, ids=np.array([5, 6, 3] if shape.by_token else [4]))
        there = Span(start=0, ids=np.array([1, 2, 5] if shape.by_token else [2]))
        for piece in pieces(kind, shape, here, *shape.extent(here, 11)):
            places = shape.places(there, piece.first, piece.end)
            data = source.gather(piece, staging)
            assert len(data) == source.num_bytes(piece)
            if run_bytes == "device":
                assert source.parts(piece) == [], "the CPU cannot read it"
            buffered.scatter(piece._replace(places=places), data)
            expected = source.sum(piece, staging) if run_bytes == "device" else checksum(data.data)
            assert source.copy(piece, target, places, staging) == expected
            assert target.sum(piece._replace(places=places), staging) == source.sum(piece, staging) == expected
    for name in shapes:
        pairs = zip(caches[1].tables[name].tensors, caches[2].tables[name].tensors, strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        assert any(tensor.view(torch.uint8).any() for tensor in caches[1].tables[name].tensors)
