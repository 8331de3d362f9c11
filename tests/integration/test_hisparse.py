"""HiSparse on gives the tokens and log-probabilities of HiSparse off, to the bit, whatever is around a request (C23,
C28)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Engine, Rig
from tests.integration.test_hybrid_tokens import Known, scores
from tests.integration.test_two_engines import Two
from tests.integration.test_widths import WIDTH, Guesses, engine_of, known_of
from tests.kernels import NATIVE
from tests.models.heads import make_headed
from tests.models.tiny import shared_tiny

TOP_K = 6  # of the small models
MODELS = ("deepseek_v32", "glm_moe_dsa")
HOT = {"hot_columns": 2 * TOP_K, "page_size": 4, "num_resident": 6}
TIGHT = {"num_tokens": 168, "schedule_conservativeness": 0.0}


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    """What each prompt gives alone, without HiSparse; some have a common beginning, and every other one is sampled."""
    return known_of(request.param)


def tiered(known: Known, **options: Any) -> Engine:
    return known.rig.engine(**{**HOT, **options})


@pytest.mark.quick(2)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [7, 512])
def test_hisparse_equals_off_by_page_and_chunk(known: Known, page_size: int, chunk: int) -> None:
    known.check(tiered(known, page_size=page_size, chunked_prefill_size=chunk), apart=1)


@pytest.mark.quick(4)
@pytest.mark.parametrize("hot_columns", [TOP_K, TOP_K + 1, 64])
@pytest.mark.parametrize("num_resident", [1, 100])
def test_hisparse_equals_off_by_size(known: Known, hot_columns: int, num_resident: int) -> None:
    engine = tiered(known, hot_columns=hot_columns, num_resident=num_resident)
    known.check(engine)
    read, loaded = (engine.count(f"hisparse_{what}_tokens") for what in ("read", "loaded"))
    assert 0 < loaded < read, "hot buffers held everything, or nothing"


@pytest.mark.quick(3)
@pytest.mark.parametrize("overlap_depth", [0, 2])
@pytest.mark.parametrize("num_resident", [3, 40])
def test_hisparse_prefix_hits_equal_off(known: Known, overlap_depth: int, num_resident: int) -> None:
    """Hits of whole prompts, of beginnings, and while the page's first reader still computes its prompt."""
    options = {"radix_cache": True, "chunked_prefill_size": 16}
    engine = tiered(known, overlap_depth=overlap_depth, num_resident=num_resident, **options)
    for apart in (0, 2, 1):
        known.check(engine, apart=apart)
    assert engine.count("cached_tokens") > 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("radix_cache", [False, True])
def test_hisparse_retraction_equals_off(known: Known, radix_cache: bool, host_bytes: int) -> None:
    options = {"radix_cache": radix_cache, "retraction_host_bytes": host_bytes, "chunked_prefill_size": 16}
    engine = tiered(known, **options, **TIGHT)
    known.check(engine)
    assert engine.count("retractions") > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("hot_columns", [TOP_K, 2 * TOP_K])
def test_hisparse_verified_drafts_equal_off(known: Known, hot_columns: int, on_host: bool) -> None:
    """Right and wrong drafts; a hot buffer holds what one query of a step reads, or little more."""
    shape = {**HOT, "page_size": 8, "hot_columns": hot_columns}
    assert WIDTH <= 8
    engine = engine_of(known, Guesses(known, seed=3), on_host=on_host, **shape)
    for apart in (0, 2):
        known.check(engine, apart=apart)
    assert engine.count("accepted_tokens") > 0


@pytest.mark.quick(4)
@pytest.mark.parametrize("roles", ["decode", "prefill", "both"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_c21_hisparse_on_one_or_both_of_two_engines_equals_off(known: Known, roles: str, page_size: int) -> None:
    """KV arrives in the host tier, in pages of another size."""
    prefill = {"page_size": page_size, "chunked_prefill_size": 20, **(HOT if roles != "decode" else {})}
    decode = {"radix_cache": True, "overlap_depth": 1, "page_size": 4, **(HOT if roles != "prefill" else {})}
    two = Two(known.rig, prefill, decode)
    for _ in range(2):
        results = two.run(known.prompts, known.params)
        assert [(result.token_ids, result.logprobs) for result in results] == known.alone


def shape_of(rng: random.Random) -> dict[str, Any]:
    """Of all that the other tests have one by one."""
    page_size = rng.choice([8, 16])
    tight = TIGHT if rng.random() < 0.5 else {}
    return {
        "page_size": page_size,
        "chunked_prefill_size": rng.choice([5, 16, 512]),
        "hot_columns": rng.randint(TOP_K, 3 * TOP_K),
        "num_resident": rng.choice([1, 3, 9, 40]),
        "overlap_depth": rng.randint(0, 2),
        "retraction_host_bytes": rng.choice([0, 1 << 20]),
        **tight,
    }


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_hisparse_random_shapes_equal_off(known: Known, seeds: range) -> None:
    """Pages, chunks, buffers, copies, hits, retraction, overlap and drafts at once, twice over one engine."""
    for seed in seeds:
        rng = random.Random(seed)
        shape = shape_of(rng)
        engine = engine_of(known, Guesses(known, seed=seed), on_host=False, **shape)
        for _ in range(2):
            known.check(engine, apart=rng.randint(0, 2))


@pytest.mark.quick(1)
def test_hisparse_int8_kv_equals_off(known: Known) -> None:
    path = shared_tiny("deepseek_v32").path
    rig = Rig(path, dtype=torch.float32, kv_dtype=torch.int8, kernels=NATIVE, num_threads=1, context_length=256)
    in_codes = Known.of(rig, known.prompts, known.params)
    in_codes.check(tiered(in_codes))
    in_codes.check(tiered(in_codes, radix_cache=True, **TIGHT))


@pytest.mark.slow
def test_hisparse_torch_kernels_equal_off() -> None:
    """In the same batch: torch's products depend on their rows."""
    path = shared_tiny("deepseek_v32").path
    rig = Rig(path, dtype=torch.float32, kernels="torch", num_threads=1, context_length=256)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [list(range(3, 40)), [5, 9]]
    off = scores(rig.engine(page_size=4).run(prompts, params))
    assert scores(rig.engine(**{**HOT, "hot_columns": TOP_K}).run(prompts, params)) == off


def test_hisparse_draft_head_keeps_its_kv_on_the_device(tmp_path: Path) -> None:
    """The head's own sparse layer reads full KV; the model's layers have two tiers."""
    made = {"dtype": torch.float32, "kernels": NATIVE, "num_threads": 1, "context_length": 256}
    rig = Rig(make_headed("deepseek_v32", tmp_path).path, draft_head=True, **made)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2)
    headed = Known.of(rig, [list(range(3, 50)), [5, 9, 7], list(range(20, 3, -1))], [params] * 3)
    engine = tiered(headed, width=4)
    plan = engine.core.scheduler.plan
    engine.core.scheduler.plan = lambda now, width=1, *_: plan(now, 4)
    headed.check(engine)
    assert engine.count("draft_tokens") > 0


def test_hisparse_sparse_draft_model_keeps_its_kv_on_the_device() -> None:
    """The model itself, which is always right."""
    path = shared_tiny("deepseek_v32").path
    made = {"dtype": torch.float32, "kernels": NATIVE, "num_threads": 1, "context_length": 256}
    rig = Rig(path, draft_model=path, **made)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
    drafted = Known.of(rig, [list(range(3, 50)), [5, 9, 7]], [params] * 2)
    engine = tiered(drafted, width=4)
    plan = engine.core.scheduler.plan
    engine.core.scheduler.plan = lambda now, width=1, *_: plan(now, 4)
    drafted.check(engine)
    assert engine.count("accepted_tokens") > 20


@pytest.mark.quick(1)
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_hisparse_host_tier_in_a_file_equals_off(known: Known, host_bytes: int, tmp_path: Path) -> None:
    options = {"radix_cache": True, "retraction_host_bytes": host_bytes, "host_path": str(tmp_path), **TIGHT}
    engine = tiered(known, **options)
    for apart in (0, 1):
        known.check(engine, apart=apart)
    assert engine.count("retractions") > 0
