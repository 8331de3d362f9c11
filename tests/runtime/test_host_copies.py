"""Copies of retracted requests in host memory (C26)."""

import torch

from forebay.config.engine_config import CacheTypes
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention
from forebay.runtime.host_copies import HostCopies, Places


def places(*pages: int) -> Places:
    return {"kv": torch.tensor(pages)}


def test_c26_a_copy_is_there_until_it_is_loaded_or_dropped():
    specs = (FullAttention(num_kv_heads=1, head_dim=4),)
    cache = CachePool(specs, CacheTypes(), num_slots={"kv": 4}, page_size=2, device="cpu")
    copies = HostCopies(cache)
    copies.save(1, places(1, 2))
    copies.save(2, places(3))
    assert copies.num_bytes == 3 * 2 * 2 * 4 * 4
    copies.load(1, places(2, 4))
    assert copies.num_bytes == 2 * 2 * 4 * 4
    copies.drop(2)
    copies.drop(2)
    assert copies.num_bytes == 0
