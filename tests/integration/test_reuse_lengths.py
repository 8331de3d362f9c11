"""C18, C19, C20: how much of a prompt is reused around each multiple of the page, the chunk and the state interval.

Engines lose whole prompts there: 5,120 tokens reuse nothing and 5,121 reuse 5,120.
"""

from __future__ import annotations

import random

import pytest
import torch

from forebay.config.engine_config import StateStrategy
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import MissReason
from tests.integration.rig import Engine, Result, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny

# Full attention; windows; windows with entries and rings; states beside attention, of convolutions, of delta attention.
STATELESS = ("llama", "gpt_oss", "deepseek_v4-short-blocks")
MODELS = (*STATELESS, "falcon_h1", "lfm3", "kimi_linear")
SHAPES = (  # page, chunk, state interval: none is a multiple of another, all are, and pages of one token
    (4, 18, 12, StateStrategy.EXTRA_BUFFER),
    (16, 32, 64, StateStrategy.NO_BUFFER),
    (1, 7, 8, StateStrategy.EXTRA_BUFFER),
)
FOLLOWING = [5, 6, 7]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest) -> Rig:
    made = Rig(shared_tiny(request.param).path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    made.name = request.param  # type: ignore[attr-defined]
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(params=SHAPES, ids=lambda shape: f"page{shape[0]}-chunk{shape[1]}-interval{shape[2]}")
def engine(rig: Rig, request: pytest.FixtureRequest) -> Engine:
    page, chunk, interval, strategy = request.param
    return rig.engine(
        page_size=page, chunked_prefill_size=chunk, track_interval=interval, strategy=strategy, radix_cache=True
    )


def around_multiples(engine: Engine, most: int = 70) -> list[int]:
    """k * c - 1, k * c and k * c + 1 for each c at which anything could end."""
    config = engine.core.scheduler.config
    steps = (config.page_size, config.chunked_prefill_size, config.kinds.track_interval)
    found = {k * c + d for c in steps for k in (1, 2, 3, 4) for d in (-1, 0, 1)}
    return sorted(length for length in found if 1 < length <= most)


def run(engine: Engine, prompt: list[int], count: int = 1) -> Result:
    [result] = engine.run([prompt], greedy(count))
    return result


def check(engine: Engine, prompt: list[int], least: int) -> Result:
    """Of a prompt at least so many tokens are reused, and the answer is that of a cold cache."""
    warm = run(engine, prompt, 2)
    assert warm.cached_tokens >= least, (len(prompt), warm.miss_reason)
    if warm.cached_tokens < len(prompt) - 1:
        assert warm.miss_reason is not None
    engine.flush_cache()
    cold = run(engine, prompt, 2)
    assert cold.cached_tokens == 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    return warm


@pytest.mark.quick(2)
def test_prompt_of_any_length_is_reused_up_to_its_last_page(engine: Engine) -> None:
    """Sent again, where the last token is always computed, and continued."""
    rng, page = random.Random(3), engine.core.scheduler.config.page_size
    for length in around_multiples(engine):
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        for again, num_known in ((prompt, length - 1), (prompt + FOLLOWING, length)):
            engine.flush_cache()
            run(engine, prompt)
            check(engine, again, num_known // page * page)


@pytest.mark.quick(2)
def test_answer_of_any_length_is_reused_up_to_a_page_or_the_last_tracked_state(rig: Rig, engine: Engine) -> None:
    """With the extra buffer the state is kept at each multiple of the interval, without it only the last one is."""
    config = engine.core.scheduler.config
    page, unit = config.page_size, config.page_size
    if rig.name not in STATELESS:  # type: ignore[attr-defined]
        is_tracked = config.kinds.strategy is StateStrategy.EXTRA_BUFFER
        unit = config.kinds.track_interval if is_tracked else 1 << 20
    prompt = [random.Random(4).randrange(3, VOCAB) for _ in range(3)]
    for length in around_multiples(engine):
        if length <= len(prompt):
            continue
        engine.flush_cache()
        # The last token of an answer is not computed, so its KV is in no cache.
        answer = run(engine, prompt, length - len(prompt) + 1).token_ids[:-1]
        check(engine, prompt + answer + FOLLOWING, length if length % page == 0 else length // unit * unit)


@pytest.mark.quick(2)
def test_prompt_that_leaves_a_longer_one_at_any_multiple_says_why_it_reuses_less(engine: Engine) -> None:
    """Behind the branch there may be no state; then the reason names what was not kept."""
    rng, page = random.Random(5), engine.core.scheduler.config.page_size
    trunk = [rng.randrange(3, VOCAB) for _ in range(75)]
    for length in around_multiples(engine)[::3]:
        engine.flush_cache()
        run(engine, trunk)
        warm = check(engine, trunk[:length] + FOLLOWING, 0)
        if warm.cached_tokens < length // page * page:
            assert warm.miss_reason in (MissReason.STATE_MISSING, MissReason.WINDOW_MISSING), length
        else:
            assert warm.cached_tokens == length // page * page
