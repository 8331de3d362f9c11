from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.config.engine_config import CacheTypes
from forebay.memory.slots import PAD
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import (
    FullAttention,
    LatentAttention,
    RecurrentState,
    SlidingWindow,
    cache_sizes,
)
from forebay.pools.mover import Places, num_bytes
from forebay.pools.regions import Regions, Tag
from tests.pools.caches import all_tensors, cache_types, regions_of

EVERYTHING = (
    FullAttention(num_kv_heads=2, head_dim=5),
    RecurrentState(conv=(6, 3), ssm=(2, 4, 3)),
    SlidingWindow(num_kv_heads=1, head_dim=4, window=8),
    LatentAttention(rank=6, rope_dim=2),
    FullAttention(num_kv_heads=1, head_dim=4, v_head_dim=6),
    RecurrentState(conv=(5, 2)),
)
EIGHT_BITS = CacheTypes(kv_cache_dtype="int8")


def pool(specs=EVERYTHING, *, num_pages: int = 4, page_size: int = 3, dtype=torch.float32, **others) -> CachePool:
    types = cache_types(dtype)
    num_slots = {"kv": num_pages, "window": 3, "state": 2}
    return CachePool(specs, types, page_size=page_size, num_slots=num_slots, device="cpu", **others)


def places(*ids: list[int]) -> Places:
    return dict(zip(("kv", "window", "state"), (torch.tensor(some, dtype=torch.int64) for some in ids), strict=True))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_has_zeros_of_its_own_with_one_place_more_than_can_be_used(dtype):
    """C5, C6"""
    cache = pool(dtype=dtype)
    shapes = [tuple(tensor.shape) for tensor in all_tensors(cache)]
    assert shapes == [
        (5, 3, 2, 5),
        (5, 3, 2, 5),
        (5, 3, 1, 8),
        (5, 3, 1, 4),
        (5, 3, 1, 6),
        (4, 3, 1, 4),
        (4, 3, 1, 4),
        (3, 6, 3),
        (3, 2, 4, 3),
        (3, 5, 2),
    ]
    tensors = list(all_tensors(cache))
    for i, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert [int(tensor.flatten()[0]) for tensor in tensors] == list(range(1, 11))
    assert (cache.state(1).conv.dtype, cache.state(1).ssm.dtype) == (dtype, torch.float32)


def test_latent_values_lie_within_the_keys_rows():
    cache = pool()
    k, v, *_ = cache.kv(3)
    k[4] = torch.arange(8.0)
    assert v[4].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("types", [cache_types(torch.float32), cache_types(torch.bfloat16), EIGHT_BITS])
def test_the_bytes_are_those_that_sizing_reckons_with(types):
    cache = CachePool(EVERYTHING, types, page_size=3, num_slots={"kv": 4, "window": 3, "state": 2}, device="cpu")
    sizes, num_bytes = cache_sizes(EVERYTHING, types), Counter[str]()
    for region in regions_of(cache):
        num_bytes[region.kind] += region.num_bytes
    assert num_bytes["kv"] == 15 * sizes.kv_bytes_per_token
    assert num_bytes["window"] == 12 * sizes.num_bytes("window")
    assert num_bytes["state"] == 3 * sizes.num_bytes("state")
    assert num_bytes.total() == sum(tensor.nbytes for tensor in all_tensors(cache))
    assert sizes.num_read("window") == 8


def test_a_layer_that_keeps_something_else_is_not_handed_out():
    with pytest.raises(AssertionError, match="RecurrentState"):
        pool().kv(1)
    with pytest.raises(AssertionError, match="FullAttention"):
        pool().state(0)


def test_c6_clearing_and_copying_touch_the_named_slots_of_every_layer():
    cache = pool()
    for tensor in cache.tables["state"].tensors:
        tensor.copy_(torch.rand(tensor.shape) + 1)
    before = [tensor.clone() for tensor in cache.tables["state"].tensors]
    cache.mover.copy("state", torch.tensor([2]), torch.tensor([1]))
    cache.tables["state"].reset_rows(torch.tensor([2]))
    for tensor, was in zip(cache.tables["state"].tensors, before, strict=True):
        assert torch.equal(tensor[1], was[2])
        assert not tensor[2].any()
        assert torch.equal(tensor[PAD], was[PAD])


def test_c26_a_copy_on_the_host_comes_back_into_other_places():
    cache = pool()
    for tensor in all_tensors(cache):
        tensor.copy_(torch.rand(tensor.shape))
    before = [tensor.clone() for tensor in all_tensors(cache)]
    copy = cache.mover.read(places([3, 1], [2], [1]))
    for tensor in all_tensors(cache):
        tensor.fill_(float("nan"))
    cache.mover.write(copy, places([2, 4], [3], [2]))
    tensors = list(all_tensors(cache))
    moves = [(3, 2), (1, 4)]
    for i, (tensor, was) in enumerate(zip(tensors, before, strict=True)):
        if i in (5, 6):  # windows
            assert torch.equal(tensor[3], was[2])
        elif i < 5:
            assert all(torch.equal(tensor[to], was[at]) for at, to in moves)
        else:
            assert torch.equal(tensor[2], was[1])
    sizes = cache_sizes(EVERYTHING, cache_types(torch.float32))
    expected = 6 * sizes.kv_bytes_per_token + 3 * sizes.num_bytes("window") + sizes.num_bytes("state")
    assert num_bytes(copy) == expected


def test_c26_a_copy_of_8_bit_kv_brings_its_scales_along():
    specs = (
        FullAttention(num_kv_heads=2, head_dim=4),
        SlidingWindow(num_kv_heads=1, head_dim=4, window=8),
        LatentAttention(rank=6, rope_dim=2),
    )
    cache = CachePool(
        specs,
        EIGHT_BITS,
        page_size=3,
        num_slots={"kv": 4, "window": 3},
        device="cpu",
    )

    def tensors() -> list[list[torch.Tensor]]:
        return [[t for t in cache.kv(i) if t is not None] for i in range(len(specs))]

    for tensor in all_tensors(cache):
        tensor.copy_(torch.randint(-100, 100, tensor.shape) if tensor.dtype == torch.int8 else torch.rand(tensor.shape))
    before = [[tensor.clone() for tensor in layer] for layer in tensors()]
    assert all(layer[-1].dtype == torch.float32 for layer in before)
    copy = cache.mover.read(places([3], [2], []))
    for tensor in all_tensors(cache):
        tensor.zero_()
    cache.mover.write(copy, places([1], [3], []))
    for (was, now), (source, target) in zip(zip(before, tensors(), strict=True), [(3, 1), (2, 3), (3, 1)], strict=True):
        for old, new in zip(was, now, strict=True):
            assert torch.equal(new[3 * target : 3 * target + 3], old[3 * source : 3 * source + 3])


def test_c14_reset_padding_zeroes_page_zero_and_slot_zero_alone():
    cache = pool()
    for tensor in all_tensors(cache):
        tensor.fill_(float("nan"))
    cache.reset_padding()
    for tensor in all_tensors(cache):
        assert not tensor[0].any()
        assert tensor[1:].isnan().all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_large_cache_takes_no_memory_until_it_is_written():
    before = resident_bytes()
    take = partial(Regions().take, Tag.KV_CACHE)
    cache = pool([FullAttention(num_kv_heads=2, head_dim=5)], num_pages=200_000, page_size=16, take=take)
    assert sum(region.num_bytes for region in regions_of(cache)) > 240 << 20
    assert resident_bytes() - before < 32 << 20
    cache.kv(0).k[: 64 << 14].fill_(1.0)
    assert resident_bytes() - before >= 32 << 20
