"""Microseconds of the host's hot operations: `python benchmarks/memory_bench.py [--quick]`.

The target beside each figure is the project's own; in brackets SGLang 0.5.23 on the same kind of machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from forebay.config.engine_config import KindConfig, Ledger, SchedulerConfig
from forebay.memory.holding import Allocation, RowTable
from forebay.memory.kinds.state.hybrid_rows import HybridReqToTokenPool, MambaPool
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import NO_NODE, Pin
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import as_ids
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.schedule_batch import ScheduleBatch
from forebay.scheduler.scheduler import Scheduler

_PARAMS = SamplingParams()
_NUM_WAITING = 256
_WAITING_LEN = 32


def median_us(rounds: int, prepare: Callable[[], Callable[[], object]]) -> float:
    times = []
    for _ in range(rounds):
        run = prepare()
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def allocations(n: int) -> list[Allocation]:
    table = RowTable(512, 1)
    return [Allocation(table, i + 1, Pin(NO_NODE, 0), 3) for i in range(n)]


def rows(n: int, rounds: int) -> float:
    pool = ReqToTokenPool(512, 128, ledger=Ledger.COUNT)
    held: list[Allocation] = []

    def prepare() -> Callable[[], object]:
        for req in held:
            pool.free(req)
        held[:] = allocations(n)
        return lambda: pool.alloc(held)

    return median_us(rounds, prepare)


def hybrid_rows(n: int, rounds: int) -> tuple[float, float]:
    """Rows with a live and a tracking slot each: handing them out together, and taking them back one by one."""
    pool = HybridReqToTokenPool(512, 128, mamba_size=1024, num_tracking=1, ledger=Ledger.COUNT)
    held: list[Allocation] = []

    def release() -> None:
        for req in held:
            pool.mamba_pool.free(as_ids(pool.take_slots(req.row)), req.id)
            pool.free(req)
        held.clear()

    def alloc() -> Callable[[], object]:
        release()
        held.extend(allocations(n))
        return lambda: pool.alloc(held)

    def free() -> Callable[[], object]:
        held.extend(allocations(n))
        pool.alloc(held)
        return release

    return median_us(rounds, alloc), median_us(rounds, free)


def single_states(in_group: bool, rounds: int) -> float:
    """256 state slots, one at a time, all of it: opening the group, taking, and closing the group."""
    pool = MambaPool(512, ledger=Ledger.COUNT)
    wanted = range(1, _NUM_WAITING + 1)

    def take() -> None:
        for owner in wanted:
            pool.take_one(owner)

    def grouped() -> None:
        with pool.group(_NUM_WAITING):
            take()

    def prepare() -> Callable[[], object]:
        pool.clear()
        return grouped if in_group else take

    return median_us(rounds, prepare)


def prefill_pass(group: AbstractContextManager[object], rounds: int) -> float:
    """`Scheduler.plan` with 256 hybrid requests waiting, all of which start, inside `group`."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 49152, (_NUM_WAITING, _WAITING_LEN)).tolist()
    config = SchedulerConfig(
        num_pages=16 * _NUM_WAITING,
        max_running_requests=_NUM_WAITING,
        context_length=256,
        chunked_prefill_size=_NUM_WAITING * _WAITING_LEN,
        ledger=Ledger.COUNT,
        kinds=KindConfig(num_slots={"state": 4 * _NUM_WAITING}),
    )

    def prepare() -> Callable[[], object]:
        scheduler = Scheduler(config)
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(i + 1, prompt, _PARAMS), 0.0)
        return lambda: scheduler.plan(0.0)

    with group:
        return median_us(rounds, prepare)


def kv(n: int, rounds: int) -> tuple[float, float]:
    pool = PagedKvAllocator(1 << 18, 1, ledger=Ledger.COUNT)
    taken = [pool.take_ids(n, 1)]

    def alloc() -> Callable[[], object]:
        pool.return_ids(taken.pop(), 1)
        return lambda: taken.append(pool.take_ids(n, 1))

    def free() -> Callable[[], object]:
        ids = pool.take_ids(n, 1)
        return lambda: pool.return_ids(ids, 1)

    return median_us(rounds, alloc), median_us(rounds, free)


def batches(rounds: int) -> tuple[float, float]:
    def batch(n: int) -> ScheduleBatch:
        made = ScheduleBatch(RowTable(512, 1))
        reqs = [Request(i + 1, [1, 2, 3], _PARAMS) for i in range(n)]
        for req, held in zip(reqs, allocations(n), strict=True):
            req.maybe_allocation = held
        made.prepare_for_prebuilt(reqs)
        return made

    keep = np.delete(np.arange(64), 17)

    def filtering() -> Callable[[], object]:
        full = batch(64)
        return lambda: full.filter_batch(keep)

    def merging() -> Callable[[], object]:
        full, one = batch(64), batch(1)
        return lambda: full.merge_batch(one)

    return median_us(rounds, filtering), median_us(rounds, merging)


def radix(num_trees: int) -> tuple[float, float, float]:
    """100 prompts of 1,000 shared and 50 own tokens, page size 1, in a pool of 262,144 pages; medians."""
    rng = np.random.default_rng(0)
    match_us, insert_us, evict_us = [], [], []
    for _ in range(num_trees):
        pool = PagedKvAllocator(1 << 18, 1, ledger=Ledger.COUNT)
        cache = RadixCache(pool, 1)
        shared = rng.integers(0, 49152, 1000, dtype=np.int32)
        for own in rng.integers(0, 49152, (101, 50), dtype=np.int32):
            key = np.concatenate([shared, own]).tobytes()
            start = time.perf_counter_ns()
            cached = cache.index.match(key).pages
            matched = time.perf_counter_ns()
            pages = np.concatenate([cached, pool.take_ids(1050 - len(cached), 1)])
            before = time.perf_counter_ns()
            cache.insert(key, pages, 1)
            done = time.perf_counter_ns()
            match_us.append((matched - start) / 1e3)
            insert_us.append((done - before) / 1e3)
        for _ in range(2):
            start = time.perf_counter_ns()
            cache.evict(50 * 50)
            evict_us.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(match_us), statistics.median(insert_us), statistics.median(evict_us)


def figures(rounds: int) -> Iterator[tuple[str, float, int | None, str]]:
    """Name, microseconds, target and SGLang's figure of each operation."""
    for n, target, sglang in ((1, 3, "12"), (64, 8, "35"), (256, 20, "102")):
        yield f"ReqToTokenPool.alloc, {n} requests", rows(n, rounds), target, sglang
    for n in (1, 64, 256):
        alloc, free = hybrid_rows(n, rounds)
        yield f"HybridReqToTokenPool.alloc, {n} requests", alloc, None, "-"
        yield f"HybridReqToTokenPool.free, {n} requests", free, None, "-"
    yield "MambaPool, 256 single slots in a group", single_states(True, rounds), 40, "150"
    yield "MambaPool, 256 single slots without", single_states(False, rounds), None, "543"
    ungrouped = patch.object(HybridReqToTokenPool, "group", lambda pool, n: nullcontext())
    yield "prefill pass, 256 hybrid requests", prefill_pass(nullcontext(), rounds // 20), None, "-"
    yield "prefill pass, the same without groups", prefill_pass(ungrouped, rounds // 20), None, "-"
    for n in (1, 64, 1024):
        alloc, free = kv(n, rounds)
        yield f"KV alloc, {n} tokens", alloc, 5, "7"
        yield f"KV free, {n} tokens", free, 5, "147"
    filtered, merged = batches(rounds)
    yield "filter_batch 64 to 63", filtered, 10, "67"
    yield "merge_batch 64 + 1", merged, 10, "15"
    match, insert, evict = radix(max(3, rounds // 50))
    yield "radix match, 1,000 shared tokens", match, 8, "12"
    yield "radix insert, 50 new tokens", insert, 15, "17"
    yield "radix evict, 50 nodes", evict, 60, "90"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    args = parser.parse_args()
    table = Table("operation", "us", "target", "[SGLang]", title="host operations, median")
    for name, us, target, sglang in figures(100 if args.quick else 1000):
        goal = "-" if target is None else f"{target}{'' if us <= target else ' missed'}"
        table.add_row(name, f"{us:.1f}", goal, f"\\[{sglang}]")
    Console().print(table)


if __name__ == "__main__":
    main()
