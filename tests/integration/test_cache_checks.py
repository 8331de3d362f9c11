"""An idle engine computes entries of its prefix cache again, and drops those whose bits differ (C19, C30)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engine.loop.core import close
from forebay.memory.tier import Prefix
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TierCopy
from forebay.scheduler.checked_prefixes import CHECK
from tests.integration.rig import Engine, Rig
from tests.kernels import NATIVE
from tests.models.adapters import adapted
from tests.models.tiny import CASE_OF, by_tier, random_ids, shared_tiny

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = random_ids(50, seed=1)
SIZES: dict[str, Any] = {"num_tokens": 320, "radix_cache": True, "max_running_requests": 2, "cached_states": 4}
CLIENTS = ("requests", "prompt_tokens", "cached_tokens", "computed_prompt_tokens", "generated_tokens")


@cache
def rig_of(case: str) -> Rig:
    path = shared_tiny(case).path
    return Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128)


def engine_of(case: str, **changes: Any) -> Engine:
    return rig_of(case).engine(**{**SIZES, "page_size": 4, "checks": True, **changes})


def begin(engine: Engine) -> None:
    engine.core.checks.turn(engine.core._clock())


def check(engine: Engine, count: int = 1) -> None:
    """Finish so many checks."""
    core = engine.core
    for _ in range(count):
        begin(engine)
        while core.checks.computing:
            assert core.step() == []
        while core.checks.busy:
            core.checks.turn(engine.core._clock())
    core.scheduler.audit()


def divergences(engine: Engine) -> dict[str, float]:
    counters = engine.core.scheduler.state(0.0).counters
    return {name.partition(".")[2]: n for name, n in counters.items() if name.startswith("cache_divergence") and n}


def namespaces(engine: Engine) -> list[str]:
    return [name for name, root in engine.core.scheduler.pools.cache.index.roots.items() if root.children]


@pytest.mark.parametrize("model_type", by_tier(CASE_OF))
def test_c19_check_every_model_type_finds_the_bits_that_are_cached(model_type: str) -> None:
    engine = engine_of(CASE_OF[model_type])
    (first,) = engine.run([PROMPT], PARAMS)
    before = {name: engine.count(name) for name in CLIENTS}
    check(engine, 2)
    assert engine.count("cache_checks") == 2
    assert engine.count("cache_checked_tokens") >= 2 * 32
    assert not divergences(engine)
    assert {name: engine.count(name) for name in CLIENTS} == before
    assert namespaces(engine) == ["0/"]
    (again,) = engine.run([PROMPT + first.token_ids], PARAMS)
    assert again.cached_tokens >= 48


def flip(engine: Engine, kind: str, slot: int) -> None:
    runner = engine.core._runner
    tensor = next(iter(runner.cache.tables[kind].tensors))
    tensor.view(len(tensor), -1).view(torch.uint8)[slot, 0] ^= 1


@pytest.mark.parametrize(("case", "kind"), [("llama", "kv"), ("gpt_oss", "window"), ("falcon_h1", "state")])
def test_c30_check_entry_that_differs_is_dropped_with_its_descendants(
    case: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(case)
    (cold,) = engine.run([PROMPT], PARAMS)
    longer = PROMPT + cold.token_ids + random_ids(20, seed=2)
    (expected,) = engine.run([longer], PARAMS)
    tier = engine.core.scheduler.memory.tiers.device
    nodes = [*tier.cache.index.nodes()][1:]
    pages = np.concatenate([node.pages for node in nodes])
    slot = pages[-1] if kind == "kv" else tier.parts[kind].kept(nodes, pages)[1][-1]
    flip(engine, kind, int(slot))
    for _ in range(20):
        check(engine)
        if divergences(engine):
            break
    assert divergences(engine) == {"step": 1}
    assert engine.count("cache_checks") <= 20
    assert caplog.text.count("cache_divergence") == 1
    assert 'history="device: step' in caplog.text
    (again,) = engine.run([longer], PARAMS)
    assert again.token_ids == expected.token_ids
    check(engine, 4)
    assert divergences(engine) == {"step": 1}


def store_altered(engine: Engine, kind: str, slot: int) -> None:
    """Alter a row of the host tier as a wrong copy would: the row has the checksum of what was copied."""
    copy = TierCopy(number=0, tier="host", slots={}, there={kind: np.array([slot])})
    rows = engine.stores["host"].fetch(copy)
    rows[kind][0, 0] ^= 1
    engine.stores["host"].store(copy, rows)


@pytest.mark.parametrize("loaded", [False, True])
def test_c30_check_of_a_tier_drops_what_differs_there_and_what_was_loaded_from_there(loaded: bool, caplog: Any) -> None:
    engine = engine_of("llama", num_tokens=160, host_tokens=1600)
    (cold,) = engine.run([PROMPT], PARAMS)
    engine.core.scheduler.pools.cache.flush()
    (host,) = engine.core.scheduler.memory.tiers.all
    _, pages = host.walk(Prefix(np.array(PROMPT[:48], dtype=np.int32).tobytes(), "0/", "", ""))
    store_altered(engine, "kv", int(pages[5]))
    if loaded:
        (wrong,) = engine.run([PROMPT], PARAMS)
        assert wrong.tiers == {"host": 48}
    for _ in range(100):
        check(engine)
        if divergences(engine):
            break
    mover = next(iter(divergences(engine)))
    assert mover in (("host_load", "host_store") if loaded else ("host_store",))
    assert "host: host_store" in caplog.text
    assert ("device: host_load" in caplog.text) is loaded
    (again,) = engine.run([PROMPT], PARAMS)
    assert again.token_ids == cold.token_ids
    assert again.cached_tokens == 20


def test_check_of_files_reads_them_and_finds_them_equal(tmp_path: Path) -> None:
    for _ in range(2):
        engine = engine_of("falcon_h1", disk=(tmp_path, {"weights": "a"}))
        engine.run([PROMPT], PARAMS)
        check(engine, 6)
        assert engine.count("cache_checks") == 6
        assert not divergences(engine)
        close(engine.core)


@pytest.mark.parametrize("at", ["launch", "plan"])
def test_c30_check_whose_step_fails_is_counted_and_the_counts_of_clients_are_not(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama")
    (first,) = engine.run([PROMPT], PARAMS)
    before = {name: engine.count(name) for name in CLIENTS}
    begin(engine)
    with monkeypatch.context() as patch:
        broken = engine.core._runner if at == "launch" else engine.core.scheduler
        patch.setattr(broken, at, lambda *_: 1 // 0)
        engine.core.step()
    while engine.core.checks.busy:
        engine.core.step() if engine.core.checks.computing else engine.core.checks.turn(engine.core._clock())
    assert engine.count("failed_steps" if at == "launch" else "recoveries") == 1
    assert {name: engine.count(name) for name in CLIENTS} == before
    (again,) = engine.run([PROMPT + first.token_ids], PARAMS)
    assert again.cached_tokens >= 48


def test_c30_error_at_the_end_of_a_check_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    (first,) = engine.run([PROMPT], PARAMS)
    begin(engine)
    with monkeypatch.context() as patch:

        def fails(request_id: int) -> None:
            patch.undo()
            raise ZeroDivisionError(request_id)

        patch.setattr(engine.core.scheduler, "abort", fails)
        (again,) = engine.run([PROMPT], PARAMS)
    assert again.token_ids == first.token_ids
    assert not engine.core.checks.busy


@pytest.fixture(params=[0, 1])
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = engine_of("falcon_h1", overlap_depth=request.param)
    engine.run([PROMPT], PARAMS)
    yield engine
    assert namespaces(engine) == ["0/"] or not any(CHECK in name for name in namespaces(engine))


@pytest.mark.parametrize("steps", range(5))
def test_c27_request_that_arrives_in_a_check_ends_it_and_has_the_tokens_of_a_cold_engine(
    running: Engine, steps: int
) -> None:
    prompt = random_ids(40, seed=5)
    (expected,) = engine_of("falcon_h1").run([prompt], PARAMS)
    begin(running)
    for _ in range(steps):
        running.core.step()
    assert running.core.checks.busy
    (result,) = running.run([prompt], PARAMS)
    assert result.token_ids == expected.token_ids
    assert not running.core.checks.busy
    assert running.core.scheduler.chunk_limit > 1 << 20
    check(running, 2)
    assert running.count("cache_checks") == 2


def test_check_steps_are_short_until_their_time_is_known() -> None:
    engine = engine_of("llama")
    engine.run([PROMPT], PARAMS)
    begin(engine)
    plans = []
    launch = engine.core._runner.launch
    engine.core._runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    while engine.core.checks.computing:
        engine.core.step()
    assert plans[0].num_tokens == 16


def test_check_that_would_evict_much_is_not_begun() -> None:
    engine = engine_of("llama", num_tokens=128)
    engine.run([random_ids(60, seed=seed) for seed in range(2)], PARAMS)
    begin(engine)
    assert not engine.core.checks.busy


def test_check_c34_entry_of_an_adapter_is_computed_with_it() -> None:
    folder = adapted("llama", "mixed").folder
    rig = Rig(
        adapted("llama", "mixed").tiny.path,
        dtype=torch.float32,
        kernels=NATIVE,
        num_threads=1,
        context_length=128,
        adapters={"first": folder},
    )
    engine = rig.engine(**SIZES, page_size=4, checks=True)
    engine.run([PROMPT, PROMPT], PARAMS, adapters=["first", ""])
    check(engine, 6)
    assert engine.count("cache_checks") == 6
    assert not divergences(engine)
    engine.core.scheduler.pools.adapters.unload("first")
    check(engine, 6)
    assert not divergences(engine)


@pytest.mark.parametrize("evicted", [False, True])
def test_c30_check_what_differs_is_not_found_in_files_after_a_restart(tmp_path: Path, evicted: bool) -> None:
    """Whether or not the tier of the files has it still: the bytes are in a segment either way."""
    files = (tmp_path, {"weights": "a"})
    engine = engine_of("llama", disk=files)
    (cold,) = engine.run([PROMPT], PARAMS)
    others = [random_ids(30, seed=seed) for seed in (7, 8)]
    engine.run(others, PARAMS)
    tiers = engine.core.scheduler.memory.tiers
    if evicted:
        tiers.named("disk").cache.flush()
    _, pages = tiers.device.walk(Prefix(np.array(PROMPT[:48], dtype=np.int32).tobytes(), "0/", "", ""))
    flip(engine, "kv", int(pages[5]))
    while not divergences(engine):
        check(engine)
    close(engine.core)
    for tokens in (20, 48):  # what is in front of the page that differs; then all of it, computed again
        engine = engine_of("llama", disk=files)
        (again,) = engine.run([PROMPT], PARAMS)
        assert (again.token_ids, again.tiers) == (cold.token_ids, {"disk": tokens})
        assert [result.tiers for result in engine.run(others, PARAMS)] == [{"disk": 28}] * 2
        close(engine.core)
