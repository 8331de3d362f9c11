"""A prefix that comes back from another tier of the cache gives the tokens of a cold engine, to the bit (C19)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.engine_config import StateStrategy
from forebay.engine.loop.core import close
from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Engine, Rig
from tests.kernels import NATIVE
from tests.models.adapters import adapted
from tests.models.tiny import CASE_OF, by_tier, random_ids, shared_tiny

LENGTH = 50
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
TIERED = {"num_tokens": 160, "radix_cache": True, "chunked_prefill_size": 32, "max_running_requests": 2}


@cache
def rig_of(case: str, kv_dtype: torch.dtype | None = None) -> Rig:
    path = shared_tiny(case).path
    return Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128, kv_dtype=kv_dtype)


def engine(rig: Rig, *, host_tokens: int, **changes: Any) -> Engine:
    return rig.engine(**{**TIERED, "cached_states": 2, **changes}, host_tokens=host_tokens)


def evict(tiered: Engine) -> None:
    """Serve other prompts, until nothing of earlier ones can be on the device."""
    for seed in range(4):
        tiered.run([random_ids(60, seed=100 + seed)], PARAMS)


def check_tier(rig: Rig, **changes: Any) -> None:
    """Compare a hit in the host tier, of a prefix that the device no longer has, with a cold engine."""
    prompt = random_ids(LENGTH, seed=1)
    cold, tiered = (engine(rig, host_tokens=tokens, **changes) for tokens in (0, 1600))
    (expected,) = cold.run([prompt], PARAMS)
    longer = prompt + expected.token_ids + random_ids(9, seed=2)
    (expected_longer,) = engine(rig, host_tokens=0, **changes).run([longer], PARAMS)
    assert tiered.run([prompt], PARAMS)[0].token_ids == expected.token_ids
    evict(tiered)
    (again,) = tiered.run([longer], PARAMS)
    page_size = tiered.core.scheduler.config.page_size
    assert again.tiers.get("host", 0) >= LENGTH // page_size * page_size // 2, f"{again.tiers} of {again.cached_tokens}"
    assert again.token_ids == expected_longer.token_ids
    assert [each.logprob for each in again.logprobs] == [each.logprob for each in expected_longer.logprobs]


@pytest.mark.parametrize("model_type", by_tier(CASE_OF))
def test_c19_host_tier_every_model_type_gives_the_bits_of_a_cold_engine(model_type: str) -> None:
    check_tier(rig_of(CASE_OF[model_type]), page_size=4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("case", "page_size"), [("llama", 1), ("falcon_h1", 1), ("gpt_oss", 1), ("falcon_h1", 16)])
def test_c19_host_tier_any_page_size_gives_the_bits_of_a_cold_engine(case: str, page_size: int, depth: int) -> None:
    check_tier(rig_of(case), page_size=page_size, overlap_depth=depth)


@pytest.mark.parametrize("case", ["gpt_oss", "falcon_h1"])
def test_c19_host_tier_with_8_bit_kv_gives_the_bits_of_a_cold_engine(case: str) -> None:
    check_tier(rig_of(case, torch.int8), page_size=4)


PAGES = {1: 50, 16: 50, 128: 200}
"""By tokens of a page the length of a prompt."""


def check_emptied(rig: Rig, tier: str, page_size: int, folder: Path) -> None:
    """Compare a hit in a tier behind the device, which has been emptied, with the computation before."""
    length = PAGES[page_size]
    of_tier: dict[str, Any] = {"host_tokens": 2048} if tier == "host" else {"host_tokens": 0, "disk": (folder, {})}
    settings = {**of_tier, "num_tokens": 512, "page_size": page_size}
    tiered = engine(rig, **settings)
    prompt = random_ids(length, seed=1)
    (cold,) = tiered.run([prompt], PARAMS)
    if tier == "host":
        tiered.core.scheduler.pools.cache.flush()
    else:
        close(tiered.core)
        tiered = engine(rig, **settings)
    (again,) = tiered.run([prompt], PARAMS)
    assert again.token_ids == cold.token_ids
    assert [each.logprob for each in again.logprobs] == [each.logprob for each in cold.logprobs]
    assert again.tiers.get(tier, 0) >= (length - 1) // page_size * page_size // 2
    close(tiered.core)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("model_type", CASE_OF)
def test_c19_every_model_type_and_page_size_gives_the_bits_of_a_cold_engine_from_a_tier(
    model_type: str, page_size: int, tmp_path: Path
) -> None:
    """Types take turns: each meets both tiers, and 8-bit KV with one size of pages."""
    turn = [*CASE_OF].index(model_type) + [*PAGES].index(page_size)
    path = shared_tiny(CASE_OF[model_type]).path
    rig = Rig(
        path,
        dtype=torch.float32,
        kernels=NATIVE,
        num_threads=1,
        context_length=256,
        kv_dtype=torch.int8 if turn % 3 == 0 else None,
    )
    check_emptied(rig, ("host", "disk")[turn % 2], page_size, tmp_path)


@pytest.mark.parametrize(("case", "kind"), [("llama", "kv"), ("gpt_oss", "window"), ("falcon_h1", "state")])
def test_c30_host_tier_row_that_was_altered_is_found_by_its_checksum_and_computed_again(
    case: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiered = engine(rig_of(case), host_tokens=1600, page_size=4)
    prompt = random_ids(LENGTH, seed=1)
    (cold,) = tiered.run([prompt], PARAMS)
    tiered.core.scheduler.pools.cache.flush()
    tiered.stores["host"]._rows[kind][:, 0] ^= 1
    (again,) = tiered.run([prompt], PARAMS)
    assert again.token_ids == cold.token_ids
    assert not again.tiers
    assert tiered.count("tier_lost_loads") == 1
    assert f'prefix_rows_lost tier=host reason="the checksum of {kind} in slot' in caplog.text


def test_c19_host_tier_with_states_at_any_length_gives_the_bits_of_a_cold_engine() -> None:
    check_tier(rig_of("falcon_h1"), page_size=1, strategy=StateStrategy.NO_BUFFER)


def test_host_tier_takes_the_bytes_that_the_scheduler_counts() -> None:
    for case in ("falcon_h1", "gpt_oss", "deepseek_v4"):
        tiered = engine(rig_of(case), host_tokens=1600, page_size=4)
        stored, mover = tiered.core.scheduler.config, tiered.core._runner.mover
        assert {kind: mover.row_bytes[kind] for kind in stored.tiers["host"]} == {
            kind: stored.kinds.slot_bytes[kind] for kind in stored.tiers["host"]
        }


def test_c34_host_tier_serves_no_other_adapter() -> None:
    paths = {name: adapted("llama", case).folder for name, case in (("first", "mixed"), ("second", "rank-16"))}
    model = adapted("llama", "mixed").tiny.path
    rig = Rig(model, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128, adapters=paths)
    prompt, names = random_ids(LENGTH, seed=1), ("first", "second", "first")
    cold = {name: engine(rig, host_tokens=0, page_size=4).run([prompt], PARAMS, adapters=[name])[0] for name in paths}
    tiered = engine(rig, host_tokens=1600, page_size=4)
    for name, num_reused in zip(names, (0, 0, (LENGTH - 1) // 4 * 4), strict=True):
        (result,) = tiered.run([prompt], PARAMS, adapters=[name])
        assert result.token_ids == cold[name].token_ids
        assert result.tiers.get("host", 0) == num_reused
        evict(tiered)


SWEPT = {"num_tokens": 320, "page_size": 4, "chunked_prefill_size": 18, "track_interval": 12, "cached_states": 16}
LENGTHS = [[k * c + d for k in (1, 2, 3, 4) for d in (-1, 0, 1) if k * c + d > 4] for c in (4, 18, 12)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("case", "tier"),
    [
        ("falcon_h1", "host"),
        ("llama", "disk"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("llama", "host"), ("falcon_h1", "disk"))),
        *(pytest.param("gpt_oss", tier, marks=pytest.mark.slow) for tier in ("host", "disk")),
    ],
)
def test_c18_tier_prompt_of_any_length_loses_at_most_a_page(case: str, tier: str, tmp_path: Path) -> None:
    """Lengths are k * c - 1, k * c and k * c + 1 for the page, the chunk and the interval of states. Files are read
    after a restart."""
    for number, lengths in enumerate(LENGTHS):
        files = tmp_path / str(number)
        of_tier: dict[str, Any] = {"host_tokens": 3200} if tier == "host" else {"host_tokens": 0, "disk": (files, {})}
        tiered = engine(rig_of(case), **of_tier, **SWEPT)
        prompts = {length: random_ids(length, seed=length) for length in lengths}
        cold = {length: tiered.run([prompt], PARAMS)[0].token_ids for length, prompt in prompts.items()}
        tiered.core.scheduler.pools.cache.flush()  # of the device alone
        if tier == "disk":
            close(tiered.core)
            tiered = engine(rig_of(case), **of_tier, **SWEPT)
        for length, prompt in prompts.items():
            (again,) = tiered.run([prompt], PARAMS)
            assert again.token_ids == cold[length]
            assert again.tiers.get(tier, 0) >= (length - 1) // 4 * 4 - 4, f"{length} tokens: {again.tiers}"
        close(tiered.core)


@pytest.mark.parametrize("case", ["llama", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_c19_host_tier_with_pages_of_128_tokens_gives_the_bits_of_a_cold_engine(case: str) -> None:
    path = shared_tiny(case).path
    rig = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    tiered = engine(rig, host_tokens=1024, num_tokens=512, page_size=128)
    prompt = random_ids(200, seed=1)
    (cold,) = tiered.run([prompt], PARAMS)
    tiered.core.scheduler.pools.cache.flush()
    (again,) = tiered.run([prompt], PARAMS)
    assert (again.token_ids, again.tiers) == (cold.token_ids, {"host": 128})


def test_c19_tiers_clock_that_jumps_back_changes_nothing(tmp_path: Path) -> None:
    folder = (tmp_path, {"weights": "a"})
    tiered = engine(rig_of("falcon_h1"), host_tokens=1600, page_size=4, disk=folder, checks=True)
    times = iter(range(10**9, 0, -1000))
    tiered.core._clock = lambda: float(next(times))
    prompt = random_ids(LENGTH, seed=1)
    (cold,) = tiered.run([prompt], PARAMS)
    for tier in ("host", "disk"):
        tiered.core.scheduler.pools.cache.flush()
        (again,) = tiered.run([prompt], PARAMS)
        assert (again.token_ids, [*again.tiers]) == (cold.token_ids, [tier])
        tiered.core.scheduler.memory.tiers.all[0].clear()
    close(tiered.core)


def test_c34_weights_that_change_find_nothing_in_any_tier(tmp_path: Path) -> None:
    """As after an update: what other weights have computed is no hit."""
    tiered = engine(rig_of("falcon_h1"), host_tokens=1600, page_size=4, disk=(tmp_path, {"weights": "a"}))
    prompt = random_ids(LENGTH, seed=1)
    tiered.run([prompt], PARAMS)
    tiered.core.scheduler.queues.weight_version += 1
    for reused in ({}, {"host": 48}):
        tiered.core.scheduler.pools.cache.flush()
        (result,) = tiered.run([prompt], PARAMS)
        assert result.tiers == reused
    close(tiered.core)
