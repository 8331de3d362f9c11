"""C28, C19, C26: the same request gives the same tokens whatever is around it. Scorecard C-1, C-2 and C-3 on the real
runner: the embedded model in bfloat16 on the native kernels, and tiny float32 models on either kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason
from forebay.text.tokenizer import Tokenizer
from tests.integration.rig import Engine, Result, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB

NEW_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
NUM_PROMPTS = 8
SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6)]
TEXT = Path(__file__).parents[2] / "docs" / "design.md"


def sampled(seed: int, max_tokens: int = NEW_TOKENS) -> SamplingParams:
    """Every kind of sampling option occurs among a few seeds."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.7 + 0.1 * (seed % 4),
        top_p=0.9 if seed % 2 else 1.0,
        top_k=40 if seed % 3 else 0,
        min_p=0.01 if seed % 5 == 0 else 0.0,
        repetition_penalty=1.2 if seed % 4 == 1 else 1.0,
        frequency_penalty=0.4 if seed % 4 == 2 else 0.0,
        bad_words=((9,), (10, 11), (12, 13, 14)) if seed % 4 == 3 else (),
        allowed_token_ids=tuple(range(3, 60)) if seed % 6 == 1 else (),
        # Most of what it would say ends it, and does not before all has been said.
        **({"min_tokens": max_tokens, "stop_token_ids": tuple(range(3, 90))} if seed % 7 == 2 else {}),
        seed=1000 + seed,
        ignore_eos=True,
    )


@dataclass(frozen=True)
class Known:
    """A rig, prompts, and what each of them gives alone in an engine of its own."""

    rig: Rig
    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: list[list[int]]

    @classmethod
    def of(cls, rig: Rig, prompts: list[list[int]], params: list[SamplingParams]) -> Known:
        alone = [rig.engine().tokens([prompt], [wanted])[0] for prompt, wanted in zip(prompts, params, strict=True)]
        return cls(rig, prompts, params, alone)

    def check(self, engine: Engine, count: int | None = None) -> None:
        assert engine.tokens(self.prompts[:count], self.params[:count]) == self.alone[:count]


@pytest.fixture(scope="module")
def known(embedded_rig: Rig, embedded_model: Path) -> Known:
    """Real text of several lengths, around page boundaries; every third prompt is sampled."""
    if not embedded_rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    ids = Tokenizer.from_path(str(embedded_model), None).encode(TEXT.read_text())
    lengths = [1, 15, 16, 17, 31, 64, 5, 63]
    prompts = [ids[i * 50 : i * 50 + length] for i, length in enumerate(lengths)]
    few = msgspec.structs.replace(GREEDY, max_tokens=3)
    return Known.of(embedded_rig, prompts, [sampled(i, 3) if i % 3 == 2 else few for i in range(NUM_PROMPTS)])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("page_size", "overlap_depth"), [(1, 1), (64, 0)])  # of pages of 16 tokens, batches follow
def test_a_batch_gives_each_what_it_gets_alone(known: Known, page_size: int, overlap_depth: int) -> None:
    known.check(known.rig.engine(page_size=page_size, overlap_depth=overlap_depth))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "count"),
    [pytest.param(1, 4, marks=pytest.mark.slow), (7, 8), pytest.param(16, 8, marks=pytest.mark.slow)],
)
def test_chunks_of_any_size_give_the_same_tokens(known: Known, chunk: int, count: int) -> None:
    known.check(known.rig.engine(chunked_prefill_size=chunk, overlap_depth=1), count)


@pytest.mark.slow
def test_one_thread_computes_what_two_do(known: Known, embedded_model: Path) -> None:
    one = Rig(embedded_model, dtype=torch.bfloat16, kernels=NATIVE, num_threads=1, context_length=512)
    known.check(one.engine())


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("radix_cache", [False, True])
def test_the_embedded_model_survives_retraction(known: Known, radix_cache: bool) -> None:
    engine = known.rig.engine(
        page_size=1, num_tokens=80, radix_cache=radix_cache, overlap_depth=1, schedule_conservativeness=0.0
    )
    known.check(engine)
    assert engine.count("retractions") > 0


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 16])
def test_cold_hit_and_flushed_caches_give_the_same_tokens(known: Known, page_size: int) -> None:
    engine = known.rig.engine(page_size=page_size, radix_cache=True)
    prompts = known.prompts[:8]
    for warm in (False, True, False):
        results = engine.run(prompts, known.params[:8])
        assert [result.token_ids for result in results] == known.alone[:8]
        assert [result.cached_tokens for result in results] == [
            (len(prompt) - 1) // page_size * page_size if warm else 0 for prompt in prompts
        ]
        if warm:
            engine.flush_cache()


@pytest.mark.slow
def test_a_conversation_that_branches_gives_what_a_cold_engine_gives(known: Known) -> None:
    """C-3: prefixes hit up to every length around a page boundary, then go on with other tokens."""
    trunk, other = known.prompts[5], known.prompts[7]
    short = msgspec.structs.replace(GREEDY, max_tokens=3)
    engine = known.rig.engine(radix_cache=True)
    engine.tokens([trunk], short)
    for shared in (0, 15, 16, 17, 64):
        prompt = trunk[:shared] + other[:5]
        (result,) = engine.run([prompt], short)
        assert result.token_ids == known.rig.engine().tokens([prompt], short)[0], shared
        assert result.cached_tokens == shared // 16 * 16


# -- tiny models: many shapes of the same workload ----------------------------------------------------------------


@pytest.fixture(scope="module", params=[NATIVE, pytest.param("torch", marks=pytest.mark.slow)])
def tiny_rig(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Rig:
    """In float32 with KV of 16 bits, as on CPUs without bfloat16 instructions."""
    rig = Rig(
        tiny_checkpoint,
        dtype=torch.float32,
        kv_dtype=torch.bfloat16,
        kernels=request.param,
        num_threads=1,
        context_length=256,
    )
    if request.param != "torch" and rig.ops.name == "torch":
        pytest.skip("no native kernels on this machine")
    return rig


@pytest.fixture(scope="module")
def tiny_known(tiny_rig: Rig) -> Known:
    rng = random.Random(0)
    trunk = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = []
    for i in range(16):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))]
        prompts.append(trunk[: rng.randrange(41)] + own if i % 2 else own)
    params = [sampled(i) if i % 2 else GREEDY for i in range(16)]
    return Known.of(tiny_rig, prompts, params)


@pytest.fixture(scope="module")
def growing(tiny_rig: Rig) -> Known:
    """Short prompts, long outputs: admitted together, they cannot stay together."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 8))] for _ in range(10)]
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return Known.of(tiny_rig, prompts, [sampled(i, 40) if i % 2 else greedy for i in range(10)])


def drawn_shape(rng: random.Random) -> dict[str, Any]:
    return {
        "page_size": rng.choice([1, 4, 16]),
        "num_tokens": rng.choice([192, 256, 4096]),
        "chunked_prefill_size": rng.choice([3, 7, 16, 512]),
        "overlap_depth": rng.choice([0, 1]),
        "radix_cache": rng.random() < 0.7,
        "max_running_requests": rng.choice([3, 16]),
        "schedule_conservativeness": rng.choice([0.0, 1.0]),
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), *SLOW_SEEDS])
def test_no_shape_of_the_engine_changes_a_token(tiny_known: Known, seed: int) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    rng = random.Random(seed)
    shape = drawn_shape(rng)
    engine = tiny_known.rig.engine(**shape)
    for _ in range(2):
        results = engine.run(tiny_known.prompts, tiny_known.params, apart=rng.randrange(3))
        assert [result.token_ids for result in results] == tiny_known.alone, shape


@pytest.mark.quick(2)
@pytest.mark.parametrize(("radix_cache", "overlap_depth"), [(False, 0), (True, 1)])
def test_requests_retracted_again_and_again_lose_no_token(
    growing: Known, radix_cache: bool, overlap_depth: int
) -> None:
    engine = growing.rig.engine(
        page_size=4,
        num_tokens=100,
        chunked_prefill_size=16,
        overlap_depth=overlap_depth,
        radix_cache=radix_cache,
        schedule_conservativeness=0.0,
    )
    growing.check(engine)
    assert engine.count("retractions") >= 5
    assert engine.count("recomputed_tokens") > 0


def test_an_evicted_prefix_is_computed_again_and_hits_again(tiny_known: Known) -> None:
    engine = tiny_known.rig.engine(page_size=4, num_tokens=256, radix_cache=True)
    prompt, wanted, alone = next(
        case for case in zip(tiny_known.prompts, tiny_known.params, tiny_known.alone, strict=True) if len(case[0]) > 20
    )
    cached = []
    for others in (False, False, True, False):
        if others:
            tiny_known.check(engine)
            assert engine.count("evicted_pages") > 0
        (result,) = engine.run([prompt], wanted)
        assert result.token_ids == alone
        cached.append(result.cached_tokens)
    whole = (len(prompt) - 1) // 4 * 4
    assert cached[0] == 0
    assert cached[1] == cached[3] == whole
    assert cached[2] < whole


@pytest.mark.slow
@pytest.mark.quick(2)
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_those_who_leave_early_change_nothing_for_those_who_stay(tiny_known: Known, overlap_depth: int) -> None:
    """Every third request is given up, at its start, in the middle of its prompt or after some tokens."""
    engine = tiny_known.rig.engine(
        page_size=4, num_tokens=512, chunked_prefill_size=16, overlap_depth=overlap_depth, radix_cache=True
    )
    results = engine.run(
        tiny_known.prompts,
        tiny_known.params,
        abort=lambda number, result: number % 3 == 0 and len(result.token_ids) >= number // 3,
    )
    for number, (result, alone) in enumerate(zip(results, tiny_known.alone, strict=True)):
        if number % 3 == 0:
            assert result.finish is FinishReason.ABORT
            assert result.token_ids == alone[: len(result.token_ids)]
        else:
            assert result.token_ids == alone
    again = engine.run(tiny_known.prompts, tiny_known.params)
    assert [result.token_ids for result in again] == tiny_known.alone


def scores(results: list[Result]) -> list[object]:
    return [(result.token_ids, result.logprobs, result.prompt_logprobs) for result in results]


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiny_rig", [NATIVE], indirect=True)
@pytest.mark.parametrize("seed", [0, 1, *SLOW_SEEDS])
def test_no_shape_of_the_engine_changes_a_log_probability(tiny_rig: Rig, growing: Known, seed: int) -> None:
    """By not a bit on the kernels that promise it; of prompts too, cached or retracted in their middle or not."""
    rng = random.Random(seed)
    asked = [
        msgspec.structs.replace(params, logprobs=i % 4 - 1, prompt_logprobs=(i + 1) % 4 - 1)
        for i, params in enumerate(growing.params)
    ]
    prompts = [prompt * 5 for prompt in growing.prompts]
    expected = scores(
        [tiny_rig.engine().run([prompt], params)[0] for prompt, params in zip(prompts, asked, strict=True)]
    )
    shape = drawn_shape(rng)
    engine = tiny_rig.engine(**{**shape, "num_tokens": 128, "schedule_conservativeness": 0.0})
    for _ in range(2):
        assert scores(engine.run(prompts, asked)) == expected, shape
    assert engine.count("retractions") > 0
