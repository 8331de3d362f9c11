"""Copies on a stream of their own: what steps, copies and the host read is written, whatever runs late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from forebay.config.engine_config import CacheTypes
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention
from forebay.pools.copy_stream import CopyStream
from forebay.pools.mover import Mover
from forebay.requests.step_plan import TierCopy
from forebay.runtime.host.host_copies import HostCopies
from forebay.runtime.host.tier_stores import HostStore, TierStores
from forebay.runtime.steps.launched import CopiedStep
from tests.pools.fake_streams import FakeGpu, Race, fake_gpu

NUM_PAGES, PAGE_SIZE = 5, 2
DEVICE = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def cache(gpu: FakeGpu) -> CachePool:
    specs = (FullAttention(num_kv_heads=1, head_dim=4),)
    return CachePool(specs, CacheTypes(), num_slots={"kv": NUM_PAGES}, page_size=PAGE_SIZE, device="cpu")


def streamed(cache: CachePool) -> Mover:
    """The mover of a cache whose device has streams."""
    table = cache.tables["kv"]
    return Mover({"kv": {name: table[name] for name in table.columns}}, PAGE_SIZE, {}, CopyStream(DEVICE))


def pages(*slots: int) -> dict[str, torch.Tensor]:
    return {"kv": torch.tensor(slots)}


def step(cache: CachePool, value: float) -> None:
    """A step that writes all pages."""
    for tensor in cache.tables["kv"].tensors:
        tensor.fill_(value)


def values(cache: CachePool, page: int) -> float:
    """What a step reads of a page."""
    tensor = next(iter(cache.tables["kv"].tensors))
    return float(tensor.select(0, page).clone().flatten().tolist()[0])


def test_c26_a_copy_of_a_retracted_request_has_what_steps_wrote_before_it_and_later_steps_read_it(
    cache: CachePool, gpu: FakeGpu
) -> None:
    copies = HostCopies(streamed(cache))
    step(cache, 1.0)
    copies.save(1, pages(1, 2))
    step(cache, 2.0)
    copies.load(1, pages(3, 4))
    assert [values(cache, page) for page in (2, 3, 4)] == [2.0, 1.0, 1.0]
    gpu.check_lifetimes()


def test_c26_rows_of_a_sleeping_engine_are_read_by_the_host_once_they_are_there(cache: CachePool) -> None:
    mover = streamed(cache)
    step(cache, 1.0)
    rows = mover.read(pages(1))
    with pytest.raises(Race, match="host and stream 1"):
        rows["kv"].numpy()
    mover.wait()
    assert rows["kv"].numpy().view(np.float32)[0, 0] == 1.0


def test_c31_a_tier_gets_rows_of_a_gpu_once_they_have_arrived_and_gives_them_back(cache: CachePool) -> None:
    mover = streamed(cache)
    store = HostStore(mover, {"kv": NUM_PAGES})
    stores = TierStores(mover, {"host": store})
    one, two = (
        TierCopy(number=number, tier="host", slots={"kv": at}, there={"kv": at})
        for number, at in ((1, np.array([1])), (2, np.array([2])))
    )
    step(cache, 1.0)
    stores.store(one, pages(1))
    step(cache, 2.0)
    stores.store(two, pages(2))
    step(cache, 3.0)
    stores.fetch(one, pages(3))
    stores.fetch(two, pages(4))
    assert [values(cache, page) for page in (1, 3, 4)] == [3.0, 1.0, 2.0]
    assert stores.differing("host", one.there, {"kv": np.array([3])}) == {"kv": [False]}


def test_c32_a_step_that_only_loads_ends_when_the_device_has_what_it_loads(cache: CachePool, gpu: FakeGpu) -> None:
    mover = streamed(cache)
    stores = TierStores(mover, {"host": HostStore(mover, {"kv": NUM_PAGES})})
    copy = TierCopy(number=1, tier="host", slots={"kv": np.array([1])}, there={"kv": np.array([1])})
    step(cache, 1.0)
    stores.store(copy, pages(1))
    stores.fetch(copy, pages(2))
    tensor = next(iter(cache.tables["kv"].tensors))
    with pytest.raises(Race, match="host and steps"):
        tensor.numpy()
    CopiedStep((), mover.written()).result()
    assert tensor.numpy()[2].flatten()[0] == 1.0
    gpu.check_lifetimes()


def test_races_are_found_where_a_stream_does_not_wait(cache: CachePool, gpu: FakeGpu) -> None:
    """The fake can fail: another stream reads what a step has written, without an event between."""
    tensor = next(iter(cache.tables["kv"].tensors))
    step(cache, 1.0)
    with gpu.within(gpu.stream()), pytest.raises(Race):
        tensor.clone()


def test_fake_gpu_memory_that_is_given_back_is_not_taken_for_memory_made_later(gpu: FakeGpu) -> None:
    """Places of pages, which torch makes outside of its dispatch, are gone when a copy returns."""
    for _ in range(20):
        pages(1, 2)["kv"].clone()
        with gpu.within(gpu.stream()):
            made = [torch.empty(2, dtype=torch.int64) for _ in range(20)]
            for each in made:
                each.fill_(0)
