"""C19, C26, C28 for models with recurrent states and sliding windows: tiny float32 models of each kind on the native
kernels, whose tokens must be the same, and log-probabilities equal to the bit, whatever is around a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from forebay.config.engine_config import StateStrategy
from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Engine, Result, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny

# Of each kind of state one, alone and beside attention; latent attention; windows, with sinks, beside convolutions and
# read by several layers; windows, entries and rings.
MODELS = (
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "jamba",
    "zamba2",
    "qwen3_5_text",
    "kimi_linear",
    "deepseek_v3",
    "glm_moe_dsa",
    "lfm3",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v4-short-blocks",
    pytest.param("glm5_next_text", marks=pytest.mark.slow),  # delta rules beside rings
    pytest.param("qwen4_exp_text", marks=pytest.mark.slow),
)
TIGHT = {"num_tokens": 160, "schedule_conservativeness": 0.0}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2)


@dataclass(frozen=True)
class Known:
    """A rig, prompts, and what each of them gives alone in an engine of its own."""

    rig: Rig
    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: list[Any]

    @classmethod
    def of(cls, rig: Rig, prompts: list[list[int]], params: list[SamplingParams]) -> Known:
        alone = [scores(rig.engine().run([prompt], wanted))[0] for prompt, wanted in zip(prompts, params, strict=True)]
        return cls(rig, prompts, params, alone)

    def check(self, engine: Engine, **run: Any) -> list[Result]:
        results = engine.run(self.prompts, self.params, **run)
        assert scores(results) == self.alone
        return results


def scores(results: list[Result]) -> list[Any]:
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest) -> Rig:
    path = shared_tiny(request.param).path
    made = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(scope="module")
def alone(rig: Rig) -> Callable[..., list[Any]]:
    """What a prompt, its tokens in a row, gives in an engine of its own."""

    @cache
    def run(*prompt: int, count: int) -> list[Any]:
        return scores(rig.engine().run([list(prompt)], greedy(count)))

    return run


@pytest.fixture(scope="module")
def growing(rig: Rig) -> Known:
    """Short prompts, long outputs: admitted together, they cannot stay together."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 8))] for _ in range(8)]
    return Known.of(rig, prompts, [greedy(40)] * 8)


@pytest.fixture(scope="module")
def known(rig: Rig) -> Known:
    """Prompts that share parts of a trunk, and prompts of their own."""
    rng = random.Random(0)
    trunk = [rng.randrange(3, VOCAB) for _ in range(70)]
    prompts = []
    for i in range(10):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))]
        prompts.append(trunk[: rng.randrange(71)] + own if i % 2 else own)
    return Known.of(rig, prompts, [greedy(16 + 2 * i) for i in range(10)])


# Every option meets every other kind of it in at least one of these; the small caches force retractions.
SHAPES = (
    {"page_size": 1, "strategy": StateStrategy.NO_BUFFER, "overlap_depth": 1, "chunked_prefill_size": 7, **TIGHT},
    {"page_size": 16, "overlap_depth": 2, "chunked_prefill_size": 16, "cached_states": 4, "max_running_requests": 3},
    {"page_size": 4, "overlap_depth": 1, "chunked_prefill_size": 3, "retraction_host_bytes": 1 << 30, **TIGHT},
    {"page_size": 4, "overlap_depth": 0, "radix_cache": False, "retraction_host_bytes": 1 << 30, **TIGHT},
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("shape", SHAPES, ids=["no-buffer", "few-rows", "kept", "no-cache"])
def test_c28_no_shape_of_the_engine_changes_a_bit(known: Known, shape: dict[str, Any]) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    engine = known.rig.engine(**{"radix_cache": True, **shape})
    hits = 0
    for apart in (0, 2):
        results = known.check(engine, apart=apart)
        hits += sum(result.cached_tokens > 0 for result in results)
    assert (hits > 0) == shape.get("radix_cache", True)
    if "num_tokens" in shape:
        assert engine.count("retractions") > 0
        assert (engine.count("retractions_kept") > 0) == ("retraction_host_bytes" in shape)


@pytest.mark.quick(2)
@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_c19_a_conversation_resumes_from_its_states(
    rig: Rig, alone: Callable[..., list[Any]], page_size: int, overlap_depth: int
) -> None:
    """Turn after turn, each from what the one before left, and the last two branching off an earlier one."""
    rng = random.Random(1)
    engine = rig.engine(page_size=page_size, radix_cache=True, overlap_depth=overlap_depth)
    history = [rng.randrange(3, VOCAB) for _ in range(40)]
    turns = []
    for _ in range(4):
        (result,) = engine.run([history], greedy(20))
        turns.append((list(history), result))
        history = history + result.token_ids + [rng.randrange(3, VOCAB) for _ in range(9)]
    branch = [*turns[1][0][:50], 5, 6, 7]
    for prompt in (branch, [*branch, 8]):
        (result,) = engine.run([prompt], greedy(20))
        turns.append((prompt, result))
    for prompt, result in turns:
        assert scores([result]) == alone(*prompt, count=20)
    for (before, said), (prompt, result) in pairwise(turns[:4]):
        assert result.cached_tokens >= len(before) + len(said.token_ids) - 1 - 2 * 16, prompt
    assert turns[-1][1].cached_tokens >= (len(branch) - 1) // page_size * page_size


@pytest.mark.slow
@pytest.mark.quick(1)
def test_c19_hits_of_every_length_around_pages(rig: Rig, alone: Callable[..., list[Any]]) -> None:
    """C-3: a trunk whose states were kept everywhere, left at every length, in a warm and in a partly evicted cache."""
    rng = random.Random(3)
    trunk = [rng.randrange(3, VOCAB) for _ in range(35)]
    engine = rig.engine(page_size=4, radix_cache=True, cached_states=200)
    for shared in (*range(1, 36, 3), 15, 16, 17, 35):
        prompt = [*trunk[:shared], 3, 4, 5]
        for _ in range(2):
            (result,) = engine.run([prompt], greedy(3))
            assert scores([result]) == alone(*prompt, count=3), shared
        assert result.cached_tokens == (len(prompt) - 1) // 4 * 4
        if shared % 2:
            engine.core.scheduler.pools.cache.evict(3)


@pytest.mark.quick(2)
@pytest.mark.parametrize("retraction_host_bytes", [0, 1 << 30])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_c26_retracted_requests_lose_no_token_kept_or_computed_again(
    growing: Known, overlap_depth: int, retraction_host_bytes: int
) -> None:
    engine = growing.rig.engine(
        page_size=4,
        num_tokens=100,
        chunked_prefill_size=16,
        overlap_depth=overlap_depth,
        radix_cache=True,
        schedule_conservativeness=0.0,
        retraction_host_bytes=retraction_host_bytes,
    )
    growing.check(engine)
    assert engine.count("retractions") >= 3
    assert (engine.count("retractions_kept") > 0) == (retraction_host_bytes > 0)
    assert engine.bytes_on_host() == 0


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_c27_aborted_requests_change_no_token_of_others(known: Known, overlap_depth: int) -> None:
    engine = known.rig.engine(
        page_size=4, num_tokens=512, chunked_prefill_size=16, overlap_depth=overlap_depth, radix_cache=True
    )
    results = engine.run(
        known.prompts,
        known.params,
        abort=lambda number, result: number % 3 == 0 and len(result.token_ids) >= number // 3,
    )
    for number, (result, alone) in enumerate(zip(scores(results), known.alone, strict=True)):
        if number % 3:
            assert result == alone
        else:
            assert result[0] == alone[0][: len(result[0])]
    known.check(engine)


@pytest.mark.slow
@pytest.mark.quick(1)
def test_c9_a_flush_with_requests_under_way_changes_nothing(known: Known) -> None:
    engine = known.rig.engine(page_size=4, radix_cache=True, chunked_prefill_size=16)
    flushes = iter(range(1_000_000))

    def flush(number: int, result: Result) -> bool:
        if next(flushes) % 7 == 0:
            engine.flush_cache()
        return False

    known.check(engine, abort=flush)
    engine.flush_cache()
    assert known.check(engine)[0].cached_tokens == 0
