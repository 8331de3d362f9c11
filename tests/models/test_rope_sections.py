"""Layers of a model with M-RoPE rotate by three positions as transformers' do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from forebay import models
from forebay.backends import make_ops
from forebay.families.base.rope import RopeSections
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from tests.models.drive import Driver
from tests.models.outers import OUTERS, make_outer, save_as_published
from tests.models.tiny import random_ids

IDS = random_ids(30, seed=1)
SECTIONS = {
    "qwen2_vl": RopeSections((1, 3, 2), interleaved=False),
    "qwen2_5_vl": RopeSections((1, 3, 2), interleaved=False),
    "qwen3_vl": RopeSections((1, 3, 2), interleaved=True),
}


@pytest.fixture(scope="module", params=SECTIONS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, RopeSections]:
    case = OUTERS[request.param]
    oracle = make_outer(case)
    folder = save_as_published(oracle, case, tmp_path_factory.mktemp(request.param))
    return oracle, open_checkpoint(folder), SECTIONS[request.param]


def loaded(checkpoint: Any, sections: RopeSections | None) -> Model:
    config = replace(checkpoint.config, rope_sections=sections)
    return models.load(replace(checkpoint, config=config), ops=make_ops("torch", 1), dtype=torch.float32)


def logits_of(model: Model, positions: Tensor) -> Tensor:
    driver = Driver(model)
    ctx, ids = driver.inputs([(1, IDS)])
    with torch.inference_mode():
        return model.logits(model.forward(replace(ctx, rope_positions=positions), ids))


def test_logits_at_three_positions_equal_transformers(made: tuple[Any, Any, RopeSections]) -> None:
    oracle, checkpoint, sections = made
    positions = torch.randint(0, 40, (3, len(IDS)), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        hidden = oracle.model.language_model(
            input_ids=torch.tensor([IDS]), position_ids=positions.unsqueeze(1), use_cache=False
        ).last_hidden_state[0]
        expected = oracle.lm_head(hidden)
    torch.testing.assert_close(logits_of(loaded(checkpoint, sections), positions), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(24, 20, 20), (11, 11, 10), (3, 2, 1), (2, 1, 3), (6, 0, 0)])
def test_sections_that_take_turns_equal_transformers(sizes: tuple[int, int, int]) -> None:
    half = sum(sizes)
    axes = torch.arange(3).view(3, 1, 1, 1).expand(3, 1, 1, half).clone()
    chosen = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(SimpleNamespace(mrope_section=sizes), axes)
    assert RopeSections(sizes, interleaved=True).axes(half) == chosen[0, 0, :half].tolist()


def test_text_has_the_bits_of_a_model_with_one_position(made: tuple[Any, Any, RopeSections]) -> None:
    _, checkpoint, sections = made
    positions = torch.arange(len(IDS)).repeat(3, 1)
    with_sections, without = (loaded(checkpoint, its) for its in (sections, None))
    assert with_sections.mrope
    assert not without.mrope
    assert torch.equal(logits_of(with_sections, positions), logits_of(without, positions))
