"""A tiny random llama through the runner: attention, pages and sampling together, on both kernel backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.config.engine_config import CacheTypes
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.budget import PoolSizes
from forebay.models import Model
from forebay.ops import Ops
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.runtime import ModelRunner, build_runner
from tests.models.tiny import VOCAB, Tiny, random_ids, shared_tiny
from tests.runtime.plans import Planner

PAGE_SIZE, PAGES_PER_ROW, NUM_ROWS = 4, 8, 5
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
DRAWN = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=77, logprobs=2)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return shared_tiny("llama")


def load(tiny: Tiny, ops: Ops) -> Model:
    path: Path = tiny.path
    return models.load(open_checkpoint(path), ops=ops, dtype=torch.float32)


def runner(model: Model, ops: Ops) -> ModelRunner:
    return build_runner(
        model,
        sizes=PoolSizes(
            num_slots={"kv": NUM_ROWS * PAGES_PER_ROW},
            page_size=PAGE_SIZE,
            max_running_requests=NUM_ROWS,
            context_length=PAGE_SIZE * PAGES_PER_ROW,
        ),
        ops=ops,
        max_num_tokens=40,
        vocab_size=VOCAB,
        types=CacheTypes(),
        device="cpu",
    )


def planner(model: Model, ops: Ops, seed: int = 0) -> Planner:
    return Planner(runner(model, ops), page_size=PAGE_SIZE, num_rows=NUM_ROWS, pages_per_row=PAGES_PER_ROW, seed=seed)


def alone(model: Model, ops: Ops, tokens: list[int], params: SamplingParams, steps: int) -> list[StepResult]:
    plans = planner(model, ops)
    plans.admit(1, tokens, params)
    return [plans.step(extends=[(1, len(tokens))])] + [plans.step(decodes=[1]) for _ in range(steps)]


def test_greedy_tokens_are_those_of_transformers(tiny, ops):
    tokens = random_ids(11, seed=3)
    results = alone(load(tiny, ops), ops, tokens, SamplingParams(temperature=0.0), steps=7)
    for result in results:
        logits = tiny.logits(tokens)[-1]
        assert result.token_ids[0] == int(logits.argmax())
        tokens.append(result.token_ids[0])


def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(tiny, ops):
    tokens = random_ids(13, seed=4)
    expected = tiny.logits(tokens).log_softmax(-1)
    model = load(tiny, ops)
    for cuts in ([13], [1, 12], [5, 4, 4]):
        plans = planner(model, ops)
        plans.admit(2, tokens, SamplingParams(temperature=0.0, prompt_logprobs=0))
        entries = []
        for cut in cuts:
            result = plans.step(extends=[(2, cut)])
            assert result.prompt_logprobs is not None
            entries += result.prompt_logprobs[0]
        assert entries.pop() is None
        values = [entry.logprob for entry in entries]
        torch.testing.assert_close(torch.tensor(values), expected[range(12), tokens[1:]].detach(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_company_cuts_and_a_poisoned_cache_change_no_bit(tiny, native_ops, params):
    """C5, C27, C28 on the native ops: a row whose KV holds a NaN fails, and nobody else is changed by a bit."""
    model = load(tiny, native_ops)
    tokens = random_ids(9, seed=5)
    expected = alone(model, native_ops, tokens, params, steps=6)
    plans = planner(model, native_ops, seed=8)
    for row in (1, 2, 4):
        plans.admit(row, random_ids(6, seed=row), (GREEDY, DRAWN)[row % 2])
    plans.admit(3, tokens, params)
    for layer in range(3):
        for tensor in plans.runner.cache.kv(layer)[:2]:
            tensor.fill_(float("nan"))
    plans.step(extends=[(1, 6), (3, 4)])
    results = [(plans.step(extends=[(2, 6), (3, 5), (4, 2)], decodes=[1]), 1)]
    slot = int(plans.pages[2, 0]) * PAGE_SIZE
    plans.runner.cache.kv(1).k[slot] = float("nan")
    bad = plans.step(decodes=[1, 2, 3])
    assert bad.failed == (1,)
    results += [(bad, 2), *((plans.step(decodes=[3, 1]), 0) for _ in range(5))]
    for (result, index), one in zip(results, expected, strict=True):
        assert result.token_ids[index] == one.token_ids[0]
        assert result.logprobs is not None
        assert one.logprobs is not None
        assert result.logprobs[index] == one.logprobs[0]
