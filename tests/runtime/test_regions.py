"""What a pool's regions say is all that it keeps, and where."""

from __future__ import annotations

import ctypes

import pytest

from forebay.pools.cache_pool import CachePool
from tests.pools.caches import regions_of
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.test_model_runner import prompt, tokens_of

pytestmark = pytest.mark.usefixtures("native_ops")


def copy_regions(source: CachePool, target: CachePool) -> None:
    """Byte for byte, as whoever moves them without knowing what they are."""
    for here, there in zip(regions_of(source), regions_of(target), strict=True):
        assert here._replace(address=there.address) == there
        ctypes.memmove(there.address, here.address, here.num_bytes)


def test_a_hybrids_regions_copied_to_another_pool_give_the_same_tokens():
    """KV pages, window pages and states; what is in no region is not needed."""
    here, there = HybridPlanner(hybrid_runner()), HybridPlanner(hybrid_runner())
    for plans in (here, there):
        plans.begin(1, prompt(1, 9))
        plans.begin(2, prompt(2, 6))
        plans.step(extends=[(1, 9), (2, 6)])
        plans.step(decodes=[1, 2])
    there.poison([])
    copy_regions(here.runner.cache, there.runner.cache)
    steps = [([], [1, 2])] * 3
    expected, got = ([plans.step(*step) for step in steps] for plans in (here, there))
    assert got == expected
    assert len(set(tokens_of(got))) > 1
