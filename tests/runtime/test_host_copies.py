"""Copies of retracted requests in host memory (C26)."""

from types import SimpleNamespace

import pytest
import torch

from forebay.config.engine_config import CacheTypes
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention
from forebay.pools.mover import Places
from forebay.requests.step_plan import HostCopy, HostWork
from forebay.runtime.host.host_copies import HostCopies, NoHostCopy


def places(*pages: int) -> Places:
    return {"kv": torch.tensor(pages)}


def copies_of_four_pages() -> HostCopies:
    specs = (FullAttention(num_kv_heads=1, head_dim=4),)
    return HostCopies(CachePool(specs, CacheTypes(), num_slots={"kv": 4}, page_size=2, device="cpu").mover)


def test_c26_a_copy_is_there_until_it_is_loaded_or_dropped():
    copies = copies_of_four_pages()
    copies.save(1, places(1, 2))
    copies.save(2, places(3))
    assert copies.num_bytes == 3 * 2 * 2 * 4 * 4
    copies.load(1, places(2, 4))
    assert copies.num_bytes == 2 * 2 * 4 * 4
    copies.drop(2)
    copies.drop(2)
    assert copies.num_bytes == 0


def test_c26_host_copies_load_of_a_copy_that_the_same_plan_drops_is_refused():
    copies = copies_of_four_pages()
    copies.save(1, places(1))
    load = HostCopy(request_id=1, slots={})
    copies.check(SimpleNamespace(host=HostWork(loads=(load,))))
    for host in (HostWork(loads=(load,), drops=(1,)), HostWork(loads=(HostCopy(request_id=2, slots={}),))):
        with pytest.raises(NoHostCopy, match="have no copy on the host"):
            copies.check(SimpleNamespace(host=host))
