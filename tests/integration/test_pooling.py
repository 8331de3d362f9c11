"""Prompts that become vectors: those of transformers, to the bit the same whatever is around them (C19, C26, C28), and
nobody's tokens differ for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.updates import FinishReason, MissReason
from forebay.speculation.ngram import Ngram
from tests.integration.rig import Engine, Result, Rig
from tests.integration.test_draft_heads import engine_of, rig_of
from tests.kernels import NATIVE
from tests.models.heads import make_right
from tests.models.tiny import VOCAB, Tiny, shared_tiny

MODELS = ("llama", "qwen3", "falcon_h1")
SCORED = (7, 9, 90)
WANTED = [*(Pooling(kind) for kind in PoolingKind), Pooling(PoolingKind.LAST, SCORED)]
TIGHT = {"num_tokens": 148, "page_size": 4, "schedule_conservativeness": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "chunks and hits": {"chunked_prefill_size": 5, "page_size": 4},
    "retraction": {"overlap_depth": 1, "chunked_prefill_size": 24, **TIGHT},
    "kept on the host": {"chunked_prefill_size": 17, "retraction_host_bytes": 1 << 30, **TIGHT},
    "guesses": {"width": 4, "page_size": 1, "max_running_requests": 3},
}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=1)


def told(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.vector


@dataclass(frozen=True)
class Known:
    """Prompts that share parts of a trunk; every third one is generated behind, the others are pooled in all ways; and
    what each gives alone."""

    tiny: Tiny
    rig: Rig
    prompts: list[list[int]]
    params: list[SamplingParams]
    alone: list[tuple[Any, ...]]

    @classmethod
    def of(cls, tiny: Tiny, rig: Rig) -> Known:
        rng = random.Random(0)
        trunk = [rng.randrange(3, VOCAB) for _ in range(50)]
        own = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
        prompts = [trunk[: rng.randrange(51)] + tail for tail in own]
        params = [
            greedy(20 + 3 * i) if i % 3 == 2 else SamplingParams.of_pooling(WANTED[i % len(WANTED)]) for i in range(12)
        ]
        alone = [rig.engine().run([prompt], wanted)[0] for prompt, wanted in zip(prompts, params, strict=True)]
        return cls(tiny, rig, prompts, params, [told(result) for result in alone])


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    tiny = shared_tiny(request.param)
    rig = Rig(tiny.path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return Known.of(tiny, rig)


def right(tiny: Tiny, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    """What transformers make of it."""
    if pooling.token_ids:
        return tiny.logits(prompt)[-1].log_softmax(dim=-1)[list(pooling.token_ids)]
    with torch.no_grad():
        hidden = tiny.oracle.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    match pooling.kind:
        case PoolingKind.LAST:
            return hidden[-1]
        case PoolingKind.CLS:
            return hidden[0]
        case PoolingKind.MEAN:
            return hidden.mean(dim=0)
        case PoolingKind.ALL:
            return hidden.flatten()


@pytest.mark.quick(2)
def test_vectors_are_those_of_transformers(known: Known) -> None:
    for prompt, params, (_, _, vector) in zip(known.prompts, known.params, known.alone, strict=True):
        if params.pooling:
            got = torch.from_numpy(np.frombuffer(vector, dtype="<f4").copy())
            torch.testing.assert_close(got, right(known.tiny, prompt, params.pooling), rtol=0, atol=1e-5)


@pytest.mark.quick(4)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_shape_of_the_engine_changes_a_bit_of_a_vector_or_of_a_neighbours_tokens(
    known: Known, shape: dict[str, Any]
) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    width = shape.get("width", 1)
    engine = known.rig.engine(radix_cache=True, proposer=Ngram(SpeculationOptions()) if width > 1 else None, **shape)
    plan = engine.core.scheduler.plan
    engine.core.scheduler.plan = lambda now, *_: plan(now, width)
    hits = 0
    for apart in (0, 2):
        for result, params, alone in zip(
            engine.run(known.prompts, known.params, apart=apart), known.params, known.alone, strict=True
        ):
            assert told(result) == alone
            if params.pooling:
                assert result.finish is FinishReason.STOP
                hits += result.cached_tokens > 0
                whole = params.pooling.kind is not PoolingKind.LAST
                assert (result.miss_reason is MissReason.POOLING) == whole
                assert not (whole and result.cached_tokens)
    assert hits
    assert not shape.get("num_tokens") or engine.count("retractions")


def test_a_head_that_drafts_is_not_disturbed_by_prompts_that_end_with_a_vector(tmp_path: Path) -> None:
    rig = rig_of(make_right("qwen3_next", tmp_path))
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(30 + 7 * i)] for i in range(6)]
    params = [greedy(20) if i % 2 else SamplingParams.of_pooling(WANTED[i // 2]) for i in range(6)]
    alone = [told(rig.engine().run([prompt], wanted)[0]) for prompt, wanted in zip(prompts, params, strict=True)]
    engine = engine_of(rig, width=3, chunked_prefill_size=16, page_size=4)
    assert [told(result) for result in engine.run(prompts, params, apart=1)] == alone
    assert engine.count("accepted_tokens")


def test_a_prompt_as_long_as_the_context_becomes_a_vector(known: Known) -> None:
    engine: Engine = known.rig.engine(chunked_prefill_size=100)
    (result,) = engine.run([[5] * 256], SamplingParams.of_pooling(Pooling(PoolingKind.MEAN)))
    assert result.vector
