"""Recorded plans on a small model: a fault of memory is shown, and nothing without one (C6, C18, C19, C28)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import ConfigError
from forebay.cli import replay as command
from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.engine.recorder import file, tiny
from forebay.engine.recorder.file import Header
from forebay.engine.recorder.recorder import Recorder, decode_all, origin_of
from forebay.memory.kinds.state.hybrid_rows import MambaPool
from forebay.memory.kinds.window.cached_windows import CachedWindows
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.radix_index import RadixIndex
from forebay.memory.slots import Ids
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.scheduler.journal import Origin, Record
from forebay.scheduler.scheduler import Scheduler
from tests.engine.test_recordings import recorded_scheduler, with_pictures_and_adapters
from tests.kinds_of import kind_config
from tests.simulation.rig import config

VOCABULARY = 60_000  # of the recorded model
CONFIGS: dict[str, Callable[[], SchedulerConfig]] = {
    "llama": config,
    "gpt_oss": lambda: config(max_running_requests=2, kinds=kind_config(num_window_pages=14, window=6)),  # the least
    "falcon_h1": lambda: config(kinds=kind_config(num_slots=12)),
    "qwen3_next": lambda: config(
        overlap_depth=1, kinds=kind_config(num_slots=30, strategy=StateStrategy.EXTRA_BUFFER, track_interval=8)
    ),
}


def recorded(settings: SchedulerConfig, seed: int, num_requests: int = 10) -> tuple[Origin, list[Record]]:
    """Record an engine whose requests have prefixes of earlier prompts, and whose tokens are random."""
    rng, scheduler, data = Random(seed), Scheduler(settings), list[bytes]()
    origin = origin_of(scheduler)
    scheduler.queues.journal = Recorder(lambda record, before=None: data.extend(filter(None, (before, record))))
    prompts, flights, now, left = [[0] * 9], list[Any](), 0.0, num_requests
    while left or scheduler.requests:
        now += 1.0
        if left and rng.random() < 0.4:
            begin = rng.choice(prompts)[: rng.randrange(40)]
            prompts.append([*begin, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20)))][:60])
            params = SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True)
            scheduler.add(Request(1000 + left, prompts[-1], params), now)
            left -= 1
        plan = scheduler.plan(now)
        flights += [] if plan is None else [plan]
        if flights and (plan is None or len(flights) > settings.overlap_depth):
            done = flights.pop(0)
            tokens = [rng.randrange(VOCABULARY) for _ in range(int(done.sample_mask.sum()))]
            scheduler.commit(done, StepResult(token_ids=tokens), now)
            scheduler.take_updates()
    scheduler.expire(now)  # the last plan is appended with it
    return origin, decode_all(data)


@pytest.mark.quick(2)
@pytest.mark.parametrize("like", CONFIGS)
def test_replay_on_tiny_recorded_plans_give_each_request_what_it_gets_alone(like: str) -> None:
    executed = tiny.run_on_tiny(*recorded(CONFIGS[like](), seed=0), like)
    assert executed.fault is None
    assert (executed.error, executed.outcome.difference, executed.outcome.ended) == ("", None, "")
    assert executed.num_compared > 30


def evict_windows(cached: CachedWindows, pages: Ids, most: int) -> int:
    """Evict windows of cached pages, also those that requests read."""
    locks, cached.map.locks = cached.map.locks, np.zeros_like(cached.map.locks)
    try:
        return EVICT_FROM(cached, pages, most)
    finally:
        cached.map.locks = locks


EVICT_FROM = CachedWindows.evict_from
FAULTS: dict[str, tuple[str, type, str, Any]] = {
    "a state that is not cleared": ("falcon_h1", MambaPool, "clear_state", lambda pool, slot, draft: None),
    "a window that is read and evicted": ("gpt_oss", CachedWindows, "evict_from", evict_windows),
    "a window that ends two pages early": (
        "gpt_oss",
        Windows,
        "first_kept",
        lambda windows, kv_len: np.maximum(np.asarray(kv_len) - 6 + 1 + 4, 0) // 4,  # of 6 tokens, pages of 4
    ),
    "a hit of another prompt's page": (
        "llama",
        RadixIndex,
        "_common",
        lambda index, key, edge, position, end: min(len(edge), end - position),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_replay_on_tiny_fault_of_memory_is_shown(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    like, owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    executed = tiny.run_on_tiny(*recorded(CONFIGS[like](), seed=0), like)
    assert executed.outcome.difference is None
    assert executed.fault is not None


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        ("falcon_h1", {"kv": {*range(1, 33)}, "state": {*range(1, 13)}}),
        ("gpt_oss", {"kv": {*range(1, 33)}, "window": {*range(1, 15)}}),
    ],
)
def test_replay_on_tiny_poisons_what_is_free(
    like: str, expected: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: dict[str, set[int]] = {}
    monkeypatch.setattr(
        tiny._Engine, "fill", lambda engine, kind, ids, value: filled.setdefault(kind, set()).update(ids.tolist())
    )
    tiny.run_on_tiny(*recorded(CONFIGS[like](), seed=0, num_requests=2), like)
    assert filled == expected


def test_replay_on_tiny_ends_at_a_picture() -> None:
    scheduler, buffer = with_pictures_and_adapters()
    records = decode_all(buffer.content().records)
    executed = tiny.run_on_tiny(origin_of(scheduler), records, "llama")
    assert "a step has a picture" in executed.outcome.ended


def test_replay_on_tiny_executes_requests_with_adapters_without_them() -> None:
    scheduler, buffer = with_pictures_and_adapters(shows=False)
    executed = tiny.run_on_tiny(origin_of(scheduler), decode_all(buffer.content().records), "llama")
    assert (executed.error, executed.outcome.ended, executed.fault) == ("", "", None)
    assert executed.num_requests == 2  # the adapter of the third was lost before its first token


def test_replay_on_tiny_of_a_file_prints_the_step_that_gives_another_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.bin"
    scheduler, buffer = recorded_scheduler()
    _, _, _, planted = FAULTS["a hit of another prompt's page"]
    monkeypatch.setattr(RadixIndex, "_common", planted)
    for number in range(1, 4):
        prompt = [9] * 4 + [number] * 6
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=2, ignore_eos=True)), 0.0)
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.commit(plan, StepResult(token_ids=[7] * int(plan.sample_mask.sum())), 0.0)
    scheduler.expire(1.0)
    file.write(path, Header(model={"model_type": "llama"}), buffer.content())
    assert command.run([str(path)]) == 0
    assert command.run([str(path), "--on", "tiny"]) == 1
    assert re.search(r"step \d+ gives request 2 at position 10 .*`--step \d+` prints", capsys.readouterr().out)
    with pytest.raises(ConfigError, match="leave one of them out"):
        command.run([str(path), "--on", "tiny", "--step", "1"])
    path.unlink()
    file.write(path, Header(model={"model_type": "llama"}, num_lost_bytes=1), buffer.content())
    with pytest.raises(ConfigError, match="never idle"):
        command.run([str(path), "--on", "tiny"])


def test_replay_on_tiny_refuses_an_engine_that_it_cannot_stand_for() -> None:
    origin, records = recorded(config(), seed=0, num_requests=1)
    with pytest.raises(ConfigError, match="keeps full KV alone, and a small falcon_h1 state"):
        tiny.run_on_tiny(origin, records, "falcon_h1")
    with pytest.raises(ConfigError, match="no small model like ''"):
        tiny.run_on_tiny(origin, records, "")
