"""What is let go of while somebody may still touch it (C8)."""

from dataclasses import dataclass

from forebay.memory.holding import DeferredFree
from tests.scheduler.rig import Rig


@dataclass
class Fence:
    """A transfer, say, that ends when it ends."""

    is_open: bool = False


def test_fences_may_open_in_any_order():
    rig = Rig()
    pools = rig.scheduler.pools
    fences = [Fence(), Fence(), Fence()]
    for fence in fences:
        pools.deferred.free(DeferredFree(fence=fence, request_id=9, pages=pools.kv.take_ids(2, 9)))
    assert (pools.deferred.num_pages, pools.kv.num_free) == (6, 58)
    fences[1].is_open = True
    rig.add(4, max_new=1)
    rig.run()  # commits look after whatever is free by now
    assert [freed.fence for freed in pools.deferred.entries] == [fences[0], fences[2]]
    assert pools.kv.num_free + pools.cache.num_pages == 60
    fences[2].is_open = True
    rig.add(4, max_new=1)
    rig.run()
    assert [freed.fence for freed in pools.deferred.entries] == [fences[0]]


def test_what_nobody_can_touch_is_released_at_once():
    pools = Rig().scheduler.pools
    pools.deferred.free(DeferredFree(fence=Fence(is_open=True), request_id=9, pages=pools.kv.take_ids(2, 9)))
    assert (pools.deferred.entries, pools.kv.num_free) == ([], 64)
