"""Memory that can be given back: where it lies, and what is left of it."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.pools.regions import Regions, Tag

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings of Linux")

PAGES = 600


def num_resident(memory: Tensor) -> int:
    """Pages of it that take memory."""
    first, last = (address // mmap.PAGESIZE for address in (memory.data_ptr(), memory.data_ptr() + len(memory) - 1))
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return int(np.count_nonzero(entries >> 62))  # present, or swapped out


@pytest.mark.parametrize("shared", [(), (Tag.KV_CACHE,)], ids=["own", "shared"])
def test_released_pages_are_gone_and_come_back_as_zeros_where_they_were(shared: tuple[Tag, ...]) -> None:
    regions = Regions(shared=shared)
    caches = [regions.take(Tag.KV_CACHE, PAGES * mmap.PAGESIZE - 5) for _ in range(2)]
    weights = regions.take(Tag.WEIGHTS, PAGES * mmap.PAGESIZE)
    for memory in (*caches, weights):
        assert not memory.any()
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        memory.fill_(7)
        assert num_resident(memory) == PAGES
    regions.release(Tag.KV_CACHE)
    assert [num_resident(memory) for memory in (*caches, weights)] == [0, 0, PAGES]
    assert not any(memory.any() for memory in caches)
    assert bool((weights == 7).all())
    assert regions.num_bytes(Tag.KV_CACHE) == 2 * (PAGES * mmap.PAGESIZE - 5)


def test_another_mapping_of_the_file_has_the_same_bytes_at_the_place_told() -> None:
    regions = Regions(shared=[Tag.KV_CACHE])
    first, second = (regions.take(Tag.KV_CACHE, size) for size in (mmap.PAGESIZE + 1, 3 * mmap.PAGESIZE))
    second.fill_(3)
    first[5] = 9
    places = [regions.place(address) for address in (first.data_ptr() + 5, second.data_ptr() + 100)]
    (fd, at), (same, there) = places
    assert fd == same
    assert there == 2 * mmap.PAGESIZE + 100
    with mmap.mmap(fd, 0) as elsewhere:
        assert (elsewhere[at], elsewhere[there]) == (9, 3)
        elsewhere[there] = 8
        assert second[100] == 8
        regions.release(Tag.KV_CACHE)
        assert elsewhere[at] == elsewhere[there] == 0
    with pytest.raises(KeyError, match="in no region that is shared: \\['kv_cache'\\] are"):
        regions.place(regions.take(Tag.WEIGHTS, 10).data_ptr())


class FakeSaver:
    """What it has come back with is anything."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.pools: dict[str, list[Tensor]] = {}

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        self.calls.append((tag, "backed up" if enable_cpu_backup else "taken"))
        yield

    def pause(self, tag: str) -> None:
        self.calls.append((tag, "paused"))

    def resume(self, tag: str) -> None:
        self.calls.append((tag, "resumed"))
        for memory in self.pools.get(tag, []):
            memory.fill_(7)


def test_where_a_saver_gives_memory_back_it_has_a_pool_per_tag_and_zeros_when_it_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.pools.regions._LINUX", False)  # so that memory is torch's, as on a GPU
    saver = FakeSaver()
    regions = Regions(saver=saver, backed_up=[Tag.WEIGHTS])
    cache = regions.take(Tag.KV_CACHE, 100)
    with regions.inside(Tag.WEIGHTS):
        weights = torch.ones(10)
    saver.pools = {"kv_cache": [cache], "weights": [weights]}
    assert regions.num_bytes(Tag.KV_CACHE) == 100
    for tag in Tag:
        for _ in range(2):  # as where a wake has failed
            regions.release(tag)
        regions.resume(tag)
    assert (bool(cache.any()), weights.tolist()) == (False, [7.0] * 10)  # a copy is the saver's to put back
    both = [(tag, call) for tag in ("kv_cache", "weights") for call in ("paused", "resumed")]
    assert saver.calls == [("kv_cache", "taken"), ("weights", "backed up"), *both]


def test_what_a_gpu_cannot_give_back_is_said_with_what_to_do() -> None:
    whys = [Regions("cuda").why_kept(tag) for tag in Tag]
    assert [why and why.rpartition(": ")[2] for why in whys] == [
        *["install forebay[cuda] and start with --enable-memory-saver"] * 2,
        None,
    ]
    assert "--weights-cpu-backup" in str(Regions("cuda", saver=FakeSaver()).why_kept(Tag.WEIGHTS))
    backed_up = Regions("cuda", saver=FakeSaver(), backed_up=[Tag.WEIGHTS])
    assert [backed_up.why_kept(tag) for tag in Tag] == [None, None, None]


@pytest.mark.gpu
def test_gpu_memory_is_free_while_it_is_released_and_there_again_where_it_was() -> None:
    pytest.importorskip("torch_memory_saver")
    from forebay.pools.gpu_saver import make_saver

    regions, size = Regions("cuda", saver=make_saver()), 1 << 30
    cache = regions.take(Tag.KV_CACHE, size)
    cache.fill_(7)
    address, before = cache.data_ptr(), torch.cuda.mem_get_info()[0]
    regions.release(Tag.KV_CACHE)
    assert torch.cuda.mem_get_info()[0] - before >= size
    regions.resume(Tag.KV_CACHE)
    assert (cache.data_ptr(), bool(cache.any())) == (address, False)


def test_memory_goes_with_the_last_who_holds_a_view() -> None:
    regions = Regions()
    memory = regions.take(Tag.WEIGHTS, 77 * mmap.PAGESIZE)
    mapped = weakref.ref(regions._mapped[Tag.WEIGHTS][0].memory)
    del regions
    assert mapped() is not None
    del memory
    assert mapped() is None
