"""How long the scheduler's calls take with 1,024 running requests, 1,024 pending ones and 10 million cached tokens.

    python -m benchmarks.growth                   # two minutes; about 1 GB
    python -m benchmarks.growth --repeats 5 --record docs/figures/growth.md

No model runs: plans are answered with made-up tokens. Each row is one call at the stated size: the median and the
largest of its times (processor time of the thread, garbage collection off), and the goal, 1 ms + 3 us per running
request. The exit code says whether all medians are within. `x loop` is the median in units of a loop of 30,000
additions, to compare machines.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import caption
from forebay.config.engine_config import (
    DisaggregationMode,
    DisaggregationOptions,
    KindConfig,
    Ledger,
    SchedulerConfig,
    SpeculationOptions,
)
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.transfers import Arrived, Closed, Offer, Offered, Rendezvous, Tail, Ticket, digest_of
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.halt import Halt, Mode, keep_cached
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import Scheduler
from forebay.speculation.ngram import Ngram

RUNNING = PENDING = 1024
PAGE_SIZE = 16
CACHED_PAGES = 640_000  # of 16 tokens: 10 million
CHUNK = 2048
WIDTH = 8

_ids = count(1)
_rng = np.random.default_rng(0)


class Row(NamedTuple):
    """A call: its name, how many requests run meanwhile, and its times in seconds."""

    name: str
    num_running: int
    seconds: list[float]

    @property
    def goal_s(self) -> float:
        return 1e-3 + 3e-6 * self.num_running


def tokens(num: int) -> list[int]:
    found: list[int] = _rng.integers(3, 50_000, num).tolist()
    return found


def scheduler(num_pages: int = 70_000, num_rows: int = RUNNING, **changes: object) -> SchedulerConfig:
    given: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "num_pages": num_pages,
        "max_running_requests": num_rows,
        "context_length": 131_072,
        "chunked_prefill_size": CHUNK,
        "mixed_chunk_size": CHUNK,
        "max_queued_requests": 1 << 20,
        "max_queued_tokens": 1 << 40,
        "queue_timeout_s": 1e9,
        "request_timeout_s": 1e9,
        "stall_timeout_s": 1e9,
        "ledger": Ledger.COUNT,
    }
    return SchedulerConfig(**{**given, **changes})  # type: ignore[arg-type]


def add(engine: Scheduler, prompt: list[int], max_tokens: int, **more: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    req = Request(next(_ids), prompt, params, **more)  # type: ignore[arg-type]
    engine.add(req, 0.0)
    return req


def timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def result(engine: Scheduler, plan: StepPlan, accepts: bool = True) -> StepResult:
    """Each request repeats its prompt of 20 tokens, so that drafts are right; or, with `accepts` False, none is."""
    if plan.width == 1 or plan.num_extends:
        reqs = [req for req, samples in zip(engine.queues.flights[-1].reqs, plan.sample_mask, strict=True) if samples]
        return StepResult(token_ids=[req.tokens[len(req.tokens) % 20] for req in reqs])
    ids: list[int] = []
    num_new: list[int] = []
    for req, q_len in zip(engine.queues.flights[-1].reqs, plan.q_lens.tolist(), strict=True):
        num = q_len if accepts else 1
        period = req.tokens[:20]
        ids += [period[(len(req.tokens) + i) % 20] for i in range(num)] if accepts else tokens(1)
        num_new.append(num)
    return StepResult(token_ids=ids, num_new=num_new)


def step(engine: Scheduler, width: int = 1, accepts: bool = True) -> tuple[float, float]:
    """Plan and commit one step; returns the seconds of both."""
    began = time.thread_time()
    plan = engine.plan(0.0, width)
    planned = time.thread_time() - began
    assert plan is not None, "nothing could be planned"
    sampled = result(engine, plan, accepts)
    committed = timed(partial(engine.commit, plan, sampled, 0.0))
    engine.take_updates()
    engine.handoff.tickets.take_orders()
    return planned, committed


def fill(engine: Scheduler, num: int = RUNNING, prompt: int = 40, **more: object) -> None:
    """Have `num` requests run."""
    for i in range(num):
        namespace = f"{i % 1000}"
        add(engine, (tokens(20) * (prompt // 20 + 1))[:prompt], 100_000, namespace=namespace, **more)
    while len(engine.queues.running) < num:
        step(engine)


def fill_cache(engine: Scheduler, num_pages: int = CACHED_PAGES, turns: int = 4) -> None:
    """Cache conversations of 32 pages in 1,000 namespaces, each in as many turns."""
    cache, kv = engine.pools.cache, engine.pools.kv
    for i in range(num_pages // 32):
        key, namespace = np.array(tokens(32 * PAGE_SIZE), dtype=np.int32), f"0/{i % 1000}"
        pages = kv.take_ids(32, 9)
        for turn in range(1, turns + 1):
            end = 32 * turn // turns
            known = cache.index.match(key[: 32 * (turn - 1) // turns * PAGE_SIZE].tobytes(), namespace).pages
            own = np.concatenate([known, pages[len(known) : end]])
            cache.insert(key[: end * PAGE_SIZE].tobytes(), own, 9, namespace)


def measured(num: int, call: Callable[[], tuple[float, ...]]) -> list[list[float]]:
    times = [call() for _ in range(num)]
    return [list(column) for column in zip(*times, strict=True)]


def decoding(repeats: int) -> Iterator[Row]:
    engine = Scheduler(scheduler(num_pages=CACHED_PAGES + 30_000))
    fill_cache(engine)
    fill(engine)
    plans, commits = measured(10 * repeats, partial(step, engine))
    yield Row("plan, all decode", RUNNING, plans)
    yield Row("commit, all decode", RUNNING, commits)

    def replace_four() -> tuple[float, float, float]:
        aborted = [timed(partial(engine.abort, id)) for id in list(engine.requests)[:4]]
        for i in range(4):
            add(engine, tokens(600), 50_000, namespace=f"{i}")
        return max(aborted), *step(engine)

    aborts, plans, commits = measured(8 * repeats, replace_four)
    yield Row("abort of one that runs", RUNNING, aborts)
    yield Row("plan that admits four of 600 tokens", RUNNING, plans)
    yield Row("commit of their prompts", RUNNING, commits)
    for i in range(PENDING):
        add(engine, tokens(20), 20, namespace=f"{i}")
    plans, commits = measured(10 * repeats, partial(step, engine))
    yield Row("plan, 1,024 wait", RUNNING, plans)
    yield Row("add, 1,024 wait", RUNNING, [timed(partial(add, engine, tokens(40), 5)) for _ in range(20 * repeats)])
    yield Row("expire, 1,024 wait", RUNNING, [timed(partial(engine.expire, 1.0)) for _ in range(5 * repeats)])
    yield Row("state, 1,024 wait", RUNNING, [timed(partial(engine.state, 1.0)) for _ in range(5 * repeats)])
    yield from hot_leaves(engine, repeats)
    cache = engine.pools.cache
    evictions = [timed(partial(cache.evict, 1000)) for _ in range(5 * repeats)]
    yield Row("evict 1,000 pages (16,000 tokens)", RUNNING, evictions)
    began = timed(engine.flush_cache)
    slices = [began]
    while engine.flushing:
        slices.append(timed(engine.continue_flush))
    yield Row(f"flush of 10 M tokens, each of {len(slices):,} slices", RUNNING, slices)


def hot_leaves(engine: Scheduler, repeats: int) -> Iterator[Row]:
    """Unpin a few prefixes again and again: what that leaves behind must not pile up until somebody pays for it."""
    cache, kv = engine.pools.cache, engine.pools.kv
    keys = [np.array(tokens(512), dtype=np.int32).tobytes() for _ in range(50)]
    for key in keys:
        cache.insert(key, kv.take_ids(32, 9), 9, "0/7")
    times = []
    for i in range(40_000 * repeats):
        pin = cache.pin(cache.index.match(keys[i % 50], "0/7"), "0/7")
        times.append(timed(partial(cache.unpin, pin)))
    yield Row("unpin of 50 hot prefixes", RUNNING, times)
    yield Row("evict behind that, 100 pages", RUNNING, [timed(partial(cache.evict, 100)) for _ in range(5 * repeats)])


def ends(repeats: int) -> Iterator[Row]:
    """As many requests end in one step as one chunk has started: 51 of 40 tokens."""
    engine = Scheduler(scheduler())
    for _ in range(RUNNING):
        add(engine, tokens(40), 10)
    commits = []
    while not engine.idle:
        before = len(engine.queues.running)
        _, committed = step(engine)
        if len(engine.queues.running) < before and not engine.queues.waiting:
            commits.append(committed)
    yield Row("commit in which 51 end", RUNNING - 51 * len(commits) // 2, commits)


def guessing(repeats: int) -> Iterator[Row]:
    for accepts, name in ((True, "all accepted"), (False, "none accepted")):
        proposer = Ngram(SpeculationOptions(num_draft_tokens=WIDTH))
        engine = Scheduler(scheduler(num_pages=400_000), proposer=proposer)
        fill(engine)
        for _ in range(12):
            step(engine, WIDTH)  # until matches are as long as the width
        plans, commits = measured(8 * repeats, partial(step, engine, WIDTH, accepts))
        yield Row(f"plan with n-gram drafts of {WIDTH - 1} tokens, {name}", RUNNING, plans)
        yield Row(f"commit of it, {name}", RUNNING, commits)
    proposer = Ngram(SpeculationOptions(num_draft_tokens=WIDTH))
    req = Request(next(_ids), tokens(100_000), SamplingParams(max_tokens=5))

    def look() -> None:
        proposer.begin_step(1)
        req.tokens.append(3)
        proposer.propose(req, WIDTH)

    yield Row("n-gram look at a prompt of 100,000 tokens, each step", 1, [timed(look) for _ in range(12)])


def decode_role(repeats: int) -> Iterator[Row]:
    options = DisaggregationOptions(
        mode=DisaggregationMode.DECODE, decode_extra_slots=PENDING, num_reserved_decode_tokens=512
    )
    config = scheduler(num_pages=400_000, disaggregation=options)
    engine = Scheduler(config, handoff=DecodeRole(options, "d"))
    fill(engine)
    reqs = [
        add(engine, tokens(200), 500, rendezvous=Rendezvous("127.0.0.1", 8998, i + 1, bytes(16)))
        for i in range(PENDING)
    ]
    plans, offers = [], []
    while engine.queues.pending:
        began = time.thread_time()
        plan = engine.plan(0.0)
        plans.append(time.thread_time() - began)
        assert plan is not None
        engine.commit(plan, result(engine, plan), 0.0)
        offers += [order for order in engine.handoff.tickets.take_orders() if isinstance(order, Offer)]
    assert len(offers) == len(reqs)
    yield Row("decode role: plan, 1,024 pending come at once", RUNNING, plans)
    heard: list[float] = []
    for offer in offers:
        heard.append(timed(partial(engine.handoff.take, Arrived(offer.ticket, Tail(offer.num_tokens, 5)), 0.0)))
        heard.append(timed(partial(engine.handoff.take, Closed(offer.ticket), 0.0)))
    yield Row("decode role: take an event", RUNNING, heard)
    for id in list(engine.requests)[:512]:
        engine.abort(id)
    plans, _ = measured(8 * repeats, partial(step, engine))
    yield Row("decode role: plan, 1,024 have arrived", RUNNING, plans)


def prefill_role(repeats: int) -> Iterator[Row]:
    options = DisaggregationOptions(mode=DisaggregationMode.PREFILL)
    engine = Scheduler(scheduler(num_rows=64, disaggregation=options), handoff=PrefillRole(options))
    prompts = [tokens(200) for _ in range(16_384)]
    for i, prompt in enumerate(prompts):
        digest = digest_of(array("i", prompt))
        engine.handoff.take(Offered(Ticket("d", i + 1, i.to_bytes(16, "little")), 200, digest, 0), 0.0)

    def come(i: int) -> None:
        add(engine, prompts[i], 1, rendezvous=Rendezvous("127.0.0.1", 8998, i + 1))

    last = range(len(prompts) - 1, len(prompts) - 1 - 40 * repeats, -1)
    yield Row("prefill role: add, 16,384 early offers", 0, [timed(partial(come, i)) for i in last])
    yield Row("prefill role: expire", 0, [timed(partial(engine.handoff.expire, 0.5)) for _ in range(5 * repeats)])


def asleep(repeats: int) -> Iterator[Row]:
    """Nothing runs: no step waits for it, and copies of gigabytes follow. It has no goal."""
    kinds = KindConfig(slot_bytes={"kv": 1 << 10}, retraction_host_bytes=(CACHED_PAGES // 2) << 10)
    engine = Scheduler(scheduler(num_pages=CACHED_PAGES + 100, kinds=kinds))
    fill_cache(engine)
    Halt(engine, Mode.WAIT)
    yield Row("keep half of 10 M cached tokens while going to sleep", -1, [timed(partial(keep_cached, engine))])


SCENES = (decoding, ends, guessing, decode_role, prefill_role, asleep)


def table(rows: list[Row], loop_s: float) -> tuple[list[str], list[list[str]]]:
    head = ["call", "median ms", "largest ms", "goal ms", "x loop"]
    body = []
    for row in rows:
        median = statistics.median(row.seconds)
        goal = f"{row.goal_s * 1e3:.2f}" if row.num_running >= 0 else "none"
        body.append([row.name, f"{median * 1e3:.3f}", f"{max(row.seconds) * 1e3:.2f}", goal, f"{median / loop_s:.2f}"])
    return head, body


def loop_seconds() -> float:
    def loop() -> None:
        total = 0
        for i in range(30_000):
            total += i

    return min(timed(loop) for _ in range(15))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=[scene.__name__ for scene in SCENES], nargs="+")
    parser.add_argument("--record", type=Path, help="a file for the table, in Markdown")
    args = parser.parse_args()
    gc.disable()
    scenes = [scene for scene in SCENES if not args.only or scene.__name__ in args.only]
    loop_s = loop_seconds()
    rows: list[Row] = []
    for scene in track(scenes, "scenes", console=Console(stderr=True), transient=True):
        rows += scene(args.repeats)
        gc.collect()
    head, body = table(rows, loop_s)
    shown = Table(*head, box=None)
    for cells in body:
        shown.add_row(*cells)
    Console(width=140).print(shown)
    print(f"a loop of 30,000 additions: {loop_s * 1e3:.2f} ms")
    if args.record:
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
        args.record.write_text("\n".join([*lines, "", caption(args.repeats, "no", quick=False), ""]))
    over = [row.name for row in rows if row.num_running >= 0 and statistics.median(row.seconds) > row.goal_s]
    print(f"over the goal: {', '.join(over) or 'none'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
