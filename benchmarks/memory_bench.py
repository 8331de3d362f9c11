"""Microseconds of the host's hot operations: `python benchmarks/memory_bench.py`.

The target beside each figure is the project's own; in brackets SGLang 0.5.23 on the same kind of machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from forebay.config.engine_config import Ledger
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.schedule_batch import ScheduleBatch

_ROUNDS = 1000
_PARAMS = SamplingParams()


def median_us(rounds: int, prepare: Callable[[], Callable[[], object]]) -> float:
    times = []
    for _ in range(rounds):
        run = prepare()
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def requests(n: int) -> list[Request]:
    return [Request(i + 1, [1, 2, 3], _PARAMS) for i in range(n)]


def rows(n: int) -> float:
    pool = ReqToTokenPool(512, 128, ledger=Ledger.COUNT)
    held: list[Request] = []

    def prepare() -> Callable[[], object]:
        for req in held:
            pool.free(req)
        held[:] = requests(n)
        return lambda: pool.alloc(held)

    return median_us(_ROUNDS, prepare)


def kv(n: int) -> tuple[float, float]:
    pool = PagedKvAllocator(1 << 18, 1, ledger=Ledger.COUNT)
    taken = [pool.take_ids(n, 1)]

    def alloc() -> Callable[[], object]:
        pool.return_ids(taken.pop(), 1)
        return lambda: taken.append(pool.take_ids(n, 1))

    def free() -> Callable[[], object]:
        ids = pool.take_ids(n, 1)
        return lambda: pool.return_ids(ids, 1)

    return median_us(_ROUNDS, alloc), median_us(_ROUNDS, free)


def batches() -> tuple[float, float]:
    def batch(n: int) -> ScheduleBatch:
        made = ScheduleBatch(256)
        made.prepare_for_prebuilt(requests(n))
        return made

    keep = np.delete(np.arange(64), 17)

    def filtering() -> Callable[[], object]:
        full = batch(64)
        return lambda: full.filter_batch(keep)

    def merging() -> Callable[[], object]:
        full, one = batch(64), batch(1)
        return lambda: full.merge_batch(one)

    return median_us(_ROUNDS, filtering), median_us(_ROUNDS, merging)


def radix() -> tuple[float, float, float]:
    """100 prompts of 1,000 shared and 50 own tokens, page size 1, in a pool of 262,144 pages; medians of 21 trees."""
    rng = np.random.default_rng(0)
    match_us, insert_us, evict_us = [], [], []
    for _ in range(21):
        pool = PagedKvAllocator(1 << 18, 1, ledger=Ledger.COUNT)
        cache = RadixCache(pool, 1)
        shared = rng.integers(0, 49152, 1000, dtype=np.int32)
        for own in rng.integers(0, 49152, (101, 50), dtype=np.int32):
            key = np.concatenate([shared, own]).tobytes()
            start = time.perf_counter_ns()
            cached = cache.match(key).pages
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


def figures() -> Iterator[tuple[str, float, float, str]]:
    for n, target, sglang in ((1, 3, "12"), (64, 8, "35"), (256, 20, "102")):
        yield f"ReqToTokenPool.alloc, {n} requests", rows(n), target, sglang
    for n in (1, 64, 1024):
        alloc, free = kv(n)
        yield f"KV alloc, {n} tokens", alloc, 5, "7"
        yield f"KV free, {n} tokens", free, 5, "147"
    filtered, merged = batches()
    yield "filter_batch 64 to 63", filtered, 10, "67"
    yield "merge_batch 64 + 1", merged, 10, "15"
    match, insert, evict = radix()
    yield "radix match, 1,000 shared tokens", match, 8, "12"
    yield "radix insert, 50 new tokens", insert, 15, "17"
    yield "radix evict, 50 nodes", evict, 60, "90"


def main() -> None:
    table = Table("operation", "us", "target", "[SGLang]", title="host operations, median")
    for name, us, target, sglang in figures():
        table.add_row(name, f"{us:.1f}", f"{target}{'' if us <= target else ' missed'}", f"\\[{sglang}]")
    Console().print(table)


if __name__ == "__main__":
    main()
