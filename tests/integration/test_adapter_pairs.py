"""C21, C28: an adapter's tokens do not depend on the other requests, on the engine's shape, or on how many engines
compute them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.engine_config import SpeculationOptions, SpeculativeAlgorithm, StateStrategy
from forebay.requests.sampling_params import SamplingParams
from forebay.speculation.ngram import Ngram
from tests.integration.rig import Engine, Rig
from tests.integration.test_hybrid_tokens import greedy, scores
from tests.integration.test_two_engines import SHAPES, Two
from tests.kernels import NATIVE
from tests.models.adapters import adapted
from tests.models.tiny import VOCAB

CASES = {"one": "mixed", "two": "rank-3-rslora", "three": "rank-16"}
TIGHT = {"num_tokens": 112, "schedule_conservativeness": 0.0}


@dataclass(frozen=True)
class Adapted:
    """Rigs with the same adapters, in other slots; prompts that begin alike, each with the base or an adapter, and
    what each gives alone."""

    rigs: tuple[Rig, Rig]
    prompts: list[list[int]]
    params: list[SamplingParams]
    names: list[str]
    alone: list[Any]

    def check(self, run: Callable[..., Any], **others: Any) -> Any:
        results = run(self.prompts, self.params, adapters=self.names, **others)
        assert scores(results) == self.alone
        return results


def make(model: str) -> Adapted:
    paths: dict[str, Path] = {name: adapted(model, case).folder for name, case in CASES.items()}
    shape: dict[str, Any] = {"dtype": torch.float32, "kernels": NATIVE, "num_threads": 1, "context_length": 256}
    path = adapted(model, "mixed").tiny.path
    first, second = (Rig(path, adapters=dict(order), **shape) for order in (paths.items(), reversed(paths.items())))
    if not first.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    rng = random.Random(3)
    trunk = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts, names = [], []
    for i in range(8):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 12))]
        prompts.append(trunk[: 12 + rng.randrange(28)] + own)
        names.append(["", *CASES][i % 4])
    params = [greedy(10 + 2 * i) for i in range(8)]
    alone = [
        scores(first.engine().run([prompt], wanted, adapters=[name]))[0]
        for prompt, wanted, name in zip(prompts, params, names, strict=True)
    ]
    return Adapted((first, second), prompts, params, names, alone)


@pytest.fixture(scope="module")
def llama() -> Adapted:
    return make("llama")


def test_c21_c28_two_engines_give_an_adapters_tokens_of_one(llama: Adapted) -> None:
    """The second time each half finds its own prompts in its cache."""
    base = llama.rigs[0].engine().run(llama.prompts, llama.params)
    same = [found == alone for found, alone in zip(scores(base), llama.alone, strict=True)]
    assert same == [not name for name in llama.names], "an adapter that changes nothing shows nothing"
    two = Two(llama.rigs[0], *SHAPES["cached"], decodes_on=llama.rigs[1])
    for _ in range(2):
        results = llama.check(two.run)
    assert all(result.cached_tokens for result in results)


ALL = {
    "pages": {"page_size": 16, "chunked_prefill_size": 20, "radix_cache": True},
    "tokens": {"page_size": 1, "overlap_depth": 1, "radix_cache": True, "chunked_prefill_size": 3},
    "tight": {"page_size": 4, "retraction_host_bytes": 1 << 30, "max_running_requests": 3, **TIGHT},
    "no-buffer": {"page_size": 1, "strategy": StateStrategy.NO_BUFFER, "overlap_depth": 1, "radix_cache": True},
    "few-rows": {"page_size": 16, "overlap_depth": 2, "chunked_prefill_size": 16, "max_running_requests": 3},
    "wide": {"page_size": 4, "width": 4, "radix_cache": True},
}


@pytest.fixture(scope="module", params=["llama", "falcon_h1", "qwen3_5_text", "mamba2", "gpt_oss", "deepseek_v4"])
def model(request: pytest.FixtureRequest) -> Adapted:
    return make(request.param)


def wide(shape: dict[str, Any]) -> dict[str, Any]:
    """With a proposer on the host, where decodes are wide."""
    ngram = Ngram(SpeculationOptions(algorithm=SpeculativeAlgorithm.NGRAM, num_draft_tokens=4))
    return {**shape, "proposer": ngram} if "width" in shape else shape


@pytest.mark.slow
@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize("beside", ["all", "same", "none"])
def test_c28_no_shape_of_the_engine_changes_a_bit_of_an_adapter(model: Adapted, shape: str, beside: str) -> None:
    engine = model.rigs[1].engine(**wide(ALL[shape]))
    for apart in (0, 2):
        if beside == "all":
            model.check(engine.run, apart=apart)
        else:
            _some(model, engine, beside)


def _some(model: Adapted, engine: Engine, beside: str) -> None:
    """Requests beside those of the same adapter, or alone."""
    groups = [[i for i, name in enumerate(model.names) if name == of] for of in ("", *CASES)]
    for group in groups if beside == "same" else [[i] for i in range(len(model.names))]:
        chosen = ([of[i] for i in group] for of in (model.prompts, model.params, model.names, model.alone))
        prompts, params, names, alone = chosen
        assert scores(engine.run(prompts, params, adapters=names)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("decode", ALL)
@pytest.mark.parametrize("prefill", ["pages", "tokens", "few-rows", "no-buffer"])
def test_c21_c28_no_shape_of_two_engines_changes_a_bit_of_an_adapter(model: Adapted, prefill: str, decode: str) -> None:
    two = Two(model.rigs[0], ALL[prefill], wide(ALL[decode]), decodes_on=model.rigs[1])
    if "width" in ALL[decode]:
        two.guess(4)
    for _ in range(2):
        model.check(two.run)
    assert decode != "tight" or two.decode.count("retractions") > 0
