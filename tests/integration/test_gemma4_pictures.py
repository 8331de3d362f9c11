"""Images in the sizes of Gemma 4: small ones see them causally, large ones have no inputs of layers, but experts."""

from __future__ import annotations

import random

import pytest
import torch

from tests.integration.rig import Rig
from tests.integration.test_pictures import Album, Shown, check_logprobs, greedy
from tests.kernels import NATIVE
from tests.models.visual import TEXT, VisualModel, shared_visual


@pytest.fixture(scope="module", params=["gemma4-causal", "gemma4-experts"])
def model(request: pytest.FixtureRequest) -> VisualModel:
    return shared_visual(request.param)


@pytest.fixture(scope="module")
def shown(model: VisualModel) -> Shown:
    rig = Rig(model.path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    album, rng = Album(model), random.Random(2)
    text = [[rng.choice(TEXT) for _ in range(9)] for _ in range(3)]
    prompts = [album.prompt(text[0], (1, 3), text[1]), album.prompt(text[0], (2, 1), (1, 2)), album.prompt(text[2])]
    return Shown.of(rig, prompts, [greedy(8)] * len(prompts))


def test_tokens_and_log_probabilities_equal_those_of_transformers(model: VisualModel, shown: Shown) -> None:
    assert check_logprobs(model, shown) > 4 * len(shown.prompts)


@pytest.mark.quick(2)
@pytest.mark.parametrize("chunk", [1, 5])
def test_tokens_do_not_depend_on_chunks_and_prefix_hits(shown: Shown, chunk: int) -> None:
    engine = shown.rig.engine(page_size=1, chunked_prefill_size=chunk, radix_cache=True)
    shown.check(engine, apart=1)
    shown.check(engine, apart=40)
