"""Recorded plans on a small model: a fault of memory is shown, and nothing without one (C6, C18, C19, C28)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import ConfigError
from forebay.cli import replay as command
from forebay.config.engine_config import SchedulerConfig, SpeculativeAlgorithm, StateStrategy
from forebay.engine.recorder import file, tiny
from forebay.engine.recorder.file import Header
from forebay.engine.recorder.recorder import Recorder, decode_all, origin_of
from forebay.engine.recorder.small_engine import UNKNOWN, Chosen, Forced, SmallEngine
from forebay.memory import pictures
from forebay.memory.kinds.state.hybrid_rows import MambaPool
from forebay.memory.kinds.window.cached_windows import CachedWindows
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.radix_index import RadixIndex
from forebay.memory.slots import Ids
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.scheduler.journal import Added, Committed, Origin, Record
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.scheduler import Scheduler
from tests.engine.test_recordings import recorded_scheduler, with_pictures_and_adapters
from tests.kinds_of import kind_config
from tests.pictures import TOKENS, picture, picture_config, with_placeholders
from tests.simulation.rig import config
from tests.simulation.workload import speculating

VOCABULARY = 60_000  # of the recorded model
PICTURES = [picture(seed, 0) for seed in (1, 2)]
CONFIGS: dict[str, Callable[[], SchedulerConfig]] = {
    "llama": config,
    "gpt_oss": lambda: config(max_running_requests=2, kinds=kind_config(num_window_pages=14, window=6)),  # the least
    "falcon_h1": lambda: config(kinds=kind_config(num_slots=12)),
    "qwen3_next": lambda: config(
        overlap_depth=1, kinds=kind_config(num_slots=30, strategy=StateStrategy.EXTRA_BUFFER, track_interval=8)
    ),
}


class Drafts(Proposer):
    """Drafts random tokens, up to as many as may be."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def propose(self, req: Request, most: int) -> Sequence[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(0, most))]


def recorded(
    settings: SchedulerConfig, seed: int, num_requests: int = 10, width: int = 1, proposer: Proposer | None = None
) -> tuple[Origin, list[Record]]:
    """Record an engine whose requests have prefixes of earlier prompts, and whose tokens are random, as is the number
    of drafts that are accepted. Every third request has a picture, one of two, if the engine takes some."""
    rng, scheduler, data = Random(seed), Scheduler(settings, proposer), list[bytes]()
    origin = origin_of(scheduler)
    scheduler.queues.journal = Recorder(lambda record, before=None: data.extend(filter(None, (before, record))))
    prompts, flights, now, left = [[0] * 9], list[Any](), 0.0, num_requests
    while left or scheduler.requests:
        now += 1.0
        if left and rng.random() < 0.4:
            begin = rng.choice(prompts)[: rng.randrange(40)]
            prompts.append([*begin, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20)))][:60])
            params = SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True)
            shown = [PICTURES[left % 2]] if settings.pictures and left % 3 == 0 and len(prompts[-1]) > TOKENS else []
            scheduler.add(Request(1000 + left, with_placeholders(prompts[-1], shown), params), now, shown)
            left -= 1
        plan = scheduler.plan(now, width)
        flights += [] if plan is None else [plan]
        if flights and (plan is None or len(flights) > settings.overlap_depth):
            done = flights.pop(0)
            counts = done.q_lens if done.width > 1 else np.ones(int(done.sample_mask.sum()), dtype=np.int64)
            num_new = [rng.randint(1, count) for count in counts.tolist()]
            tokens = [rng.randrange(VOCABULARY) for _ in range(sum(num_new))]
            scheduler.commit(done, StepResult(token_ids=tokens, num_new=num_new if done.width > 1 else None), now)
            scheduler.take_updates()
    scheduler.expire(now)  # the last plan is appended with it
    return origin, decode_all(data)


@pytest.mark.quick(1)
@pytest.mark.parametrize("like", CONFIGS)
def test_replay_on_tiny_recorded_plans_give_each_request_what_it_gets_alone(like: str) -> None:
    executed = tiny.run_on_tiny(*recorded(CONFIGS[like](), seed=0), like)
    assert executed.fault is None
    assert (executed.error, executed.outcome.difference, executed.outcome.ended) == ("", None, "")
    assert executed.num_compared > 30


def test_replay_on_tiny_choice_without_a_finite_logprob_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """C30: two results that are not numbers are not equal."""
    run = SmallEngine.run

    def unknown(engine: SmallEngine, plan: StepPlan, forced: Forced | None) -> Iterator[tuple[int, int, Chosen]]:
        return ((row, length, UNKNOWN) for row, length, _ in run(engine, plan, forced))

    monkeypatch.setattr(SmallEngine, "run", unknown)
    executed = tiny.run_on_tiny(*recorded(config(), seed=0, num_requests=1), "llama")
    assert executed.fault is not None


def test_replay_on_tiny_of_a_recording_without_a_token_says_that_nothing_was_compared() -> None:
    origin, records = recorded(config(), seed=0, num_requests=0)
    assert [*command.executed_lines(tiny.run_on_tiny(origin, records, "llama"))] == [
        "nothing was compared: no recorded step chose a token"
    ]


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


@pytest.mark.quick(2)
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

    def fill(engine: SmallEngine, kind: str, ids: Ids, value: float) -> None:
        filled.setdefault(kind, set()).update(ids.tolist())

    monkeypatch.setattr(SmallEngine, "fill", fill)
    tiny.run_on_tiny(*recorded(CONFIGS[like](), seed=0, num_requests=2), like)
    assert filled == expected


DRAFTS: dict[str, tuple[str, Proposer | None]] = {
    "drafts of the host": ("llama", Drafts(Random(1))),
    "drafts of the device, states": ("falcon_h1", None),
    "drafts of the host, windows": ("gpt_oss", Drafts(Random(2))),
    "drafts of the device, tracked states": ("qwen3_next", None),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_replay_on_tiny_drafts_are_accepted_as_recorded_and_change_no_token(drafts: str) -> None:
    """C16: of a draft that is rejected, a wrong token is computed as well, which must change nothing."""
    like, proposer = DRAFTS[drafts]
    settings = speculating(CONFIGS[like](), SpeculativeAlgorithm.NGRAM, width=3)
    origin, records = recorded(settings, seed=0, width=3, proposer=proposer)
    wide = [record.num_new for record in records if isinstance(record, Committed) and record.num_new]
    assert {1, 2, 3} <= {count for counts in wide for count in counts}
    executed = tiny.run_on_tiny(origin, records, like)
    assert executed.fault is None
    assert (executed.error, executed.outcome.difference, executed.outcome.ended) == ("", None, "")
    assert executed.num_compared > 30


def test_replay_on_tiny_fault_of_memory_is_shown_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaPool, "clear_state", lambda pool, slot, draft: None)
    settings = speculating(CONFIGS["falcon_h1"](), SpeculativeAlgorithm.NGRAM, width=3)
    assert tiny.run_on_tiny(*recorded(settings, seed=0, width=3), "falcon_h1").fault is not None


@pytest.mark.parametrize(("like", "mrope"), [("llama", False), ("qwen2_5_vl", True)])
def test_replay_on_tiny_pictures_are_those_of_each_request_alone(like: str, mrope: bool) -> None:
    settings = config(pictures=picture_config(vocab_size=1 << 16, mrope=mrope))
    origin, records = recorded(settings, seed=0)
    assert len({shown.digest for each in records if isinstance(each, Added) for shown in each.pictures}) == 2
    executed = tiny.run_on_tiny(origin, records, like)
    assert executed.fault is None
    assert (executed.error, executed.outcome.difference, executed.outcome.ended) == ("", None, "")
    assert executed.num_compared > 30


def test_replay_on_tiny_encoding_of_another_picture_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """C34: without the digest in the key, two pictures of one size are one."""
    monkeypatch.setattr(pictures, "_key", lambda namespace, shown: (namespace, b"", shown.grid, shown.sizes))
    executed = tiny.run_on_tiny(*recorded(config(pictures=picture_config(vocab_size=1 << 16)), seed=0), "llama")
    assert executed.outcome.difference is None
    assert executed.fault is not None


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
