"""After a failure whose books are wrong everything is free: a lost cache is better than a wrong one (C8, C27)."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forebay.base.errors import EngineError
from forebay.base.package import ROOT
from forebay.config.engine_config import KindConfig, Ledger
from forebay.memory.slots import CACHE
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import FinishReason
from forebay.scheduler.halt import forget_caches, keep_cached, weights_changed
from tests.kinds_of import kind_config, resized
from tests.scheduler.rig import Rig

BOTH = kind_config(num_slots=24, track_interval=4, anchor_interval=1000, num_window_pages=64, window=6)


@pytest.mark.parametrize("state", [kind_config(), BOTH], ids=["plain", "hybrid"])
def test_wrong_books_are_cleared_and_everybody_still_gets_all_tokens(state: KindConfig) -> None:
    rig = Rig(kinds=state)
    reqs = [rig.add(9, max_new=4) for _ in range(3)]
    rig.step()
    plan = rig.launch()
    assert plan is not None
    nobody = 99
    rig.scheduler.pools.kv.take_ids(1, nobody)
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("the step failed"))
    assert rig.scheduler.counters["books_cleared"] == 1
    assert rig.free_pages == rig.scheduler.pools.kv.capacity
    rig.scheduler.audit()
    rig.run()
    assert [rig.finish_of(req) for req in reqs] == [FinishReason.LENGTH] * 3
    assert [len(rig.tokens_of(req)) for req in reqs] == [4] * 3


@pytest.mark.parametrize("state", [kind_config(), BOTH], ids=["plain", "hybrid"])
def test_quarantine_leaks_slot_booked_to_the_cache_and_in_no_node_is_found(state: KindConfig) -> None:
    """C8: the books of every pool are wrong by one slot, which nobody could ever have again."""
    rig = Rig(kinds=state, ledger=Ledger.COUNT)
    rig.add(13, max_new=3)
    rig.run()
    pools = rig.scheduler.pools
    own = [slots for slots, _ in pools.all if slots is not pools.rows.slots]
    for slots in own:
        slots.take_ids(1, CACHE)
    assert rig.scheduler.reclaim_leaks() == len(own)
    assert [slots.num_quarantined for slots in own] == [1] * len(own)
    assert rig.scheduler.counters["leaked_pages"] == len(own)
    rig.scheduler.audit()
    assert rig.scheduler.reclaim_leaks() == 0
    cached = pools.cache.num_pages
    again = rig.add(list(range(100, 113)), max_new=3)
    rig.run()
    assert rig.finish_of(again) is FinishReason.LENGTH
    assert pools.cache.num_pages >= cached > 0


def flush(rig: Rig) -> None:
    rig.scheduler.flush_cache()
    while rig.scheduler.continue_flush():
        pass


def sleep(rig: Rig) -> None:
    forget_caches(rig.scheduler, 0.0)


def sleep_and_keep(rig: Rig) -> None:
    keep_cached(rig.scheduler, 0.0)


def other_weights(rig: Rig) -> None:
    weights_changed(rig.scheduler, 1)


def lose_books(rig: Rig) -> None:
    """A step fails while a ledger is wrong."""
    rig.add(list(range(200, 209)), max_new=4)
    plan = rig.launch()
    assert plan is not None
    rig.scheduler.pools.kv.take_ids(1, 99)
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("the step failed"))
    assert rig.scheduler.counters["books_cleared"] == 1
    rig.run()


@pytest.mark.parametrize("clear", [flush, sleep, sleep_and_keep, other_weights, lose_books])
@pytest.mark.parametrize("state", [kind_config(), BOTH], ids=["plain", "hybrid"])
def test_c1_generations_survive_whatever_clears_the_pools(state: KindConfig, clear: Callable[[Rig], None]) -> None:
    """A reader that noted a row, page or slot with its generation never takes a later tenant's for what it noted."""
    rig = Rig(kinds=state)
    rig.add(9, max_new=4)
    rig.run()
    pools = [slots for slots, _ in rig.scheduler.pools.all]
    noted = [slots.generation.copy() for slots in pools]
    clear(rig)
    for slots, before in zip(pools, noted, strict=True):
        assert (slots.generation >= before).all(), slots.name
    rig.add(list(range(300, 309)), max_new=4)
    rig.step()
    for slots, before in zip(pools, noted, strict=True):
        taken = np.flatnonzero(slots.owner > 0)
        assert len(taken), slots.name
        assert (slots.generation[taken] > before.max()).all(), f"{slots.name}: a generation came twice"
    rig.run()


def failing(num_pages: int, state: KindConfig, num_lost: int) -> tuple[Rig, StepPlan]:
    """Some requests of which a step is about to fail, and pages booked for nobody."""
    rig = Rig(num_pages=num_pages, kinds=state)
    for _ in range(3):
        rig.add(9, max_new=4)
    rig.step()
    plan = rig.launch()
    assert plan is not None
    if num_lost:
        rig.scheduler.pools.kv.take_ids(num_lost, 99)
    rig.flights.clear()
    return rig, plan


@pytest.mark.parametrize("num_lost", [0, 1], ids=["sound books", "wrong books"])
@pytest.mark.parametrize("state", [kind_config(), resized(BOTH, num_window_pages=1 << 18)], ids=["plain", "hybrid"])
def test_recovery_takes_no_memory_in_proportion_to_the_pools(state: KindConfig, num_lost: int) -> None:
    """2 MiB for each array of a pool's length, where the audit and the clearing had several."""
    rig, plan = failing(1 << 18, state, num_lost)
    tracemalloc.start()
    try:
        rig.scheduler.fail(plan, EngineError("the step failed"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rig.scheduler.counters["books_cleared"] == num_lost
    assert peak < 1 << 20
    rig.run()
    assert [len(rig.tokens_of(req)) for req in rig.reqs.values()] == [4] * 3


_SHORT = """
import resource
from forebay.base.errors import EngineError
from forebay.base.heap import Reserve
from tests.kinds_of import kind_config
from tests.scheduler.test_recovery import failing
import numpy as np

for _ in range(2):  # the first recovery loads what Python keeps: source lines of tracebacks, modules, arenas
    rig, plan = failing(1 << 20, kind_config(), 1)
    rig.scheduler.fail(plan, EngineError("the step failed"))
rig, plan = failing(1 << 20, kind_config(), 1)
reserve = Reserve(2 << 20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, used))
full = []
try:
    while True:  # what the collector has freed of the first schedulers is filled as well
        full.append(np.ones(1 << 20))
except MemoryError:
    print("short")
for _ in range(3):
    with reserve.spent():
        rig.scheduler.fail(plan, EngineError("the step failed"))
    assert reserve.is_there
    plan = rig.launch()
    rig.flights.clear()
print("books", *(int(rig.scheduler.counters[name]) for name in ("books_cleared", "failed_steps")))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_recovery_under_a_limit_that_stays_leaves_a_scheduler_that_works() -> None:
    """C27: nothing more can be mapped, before, during and after the recovery."""
    done = subprocess.run([sys.executable, "-c", _SHORT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.split("\n")[:2] == ["short", "books 1 3"], done.stderr
