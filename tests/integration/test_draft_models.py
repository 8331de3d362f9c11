"""C16, C17 with a smaller model that drafts: tokens and log-probabilities are those of plain decoding to the bit,
whatever it drafts and whatever is around a request; and drafts that are right are believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.rig import Rig
from tests.integration.test_draft_heads import SHAPES, engine_of, known_of, run_steps
from tests.integration.test_hybrid_tokens import Known
from tests.kernels import NATIVE
from tests.models.tiny import shared_tiny
from tests.models.visual import shared_visual


def rig_of(target: str, draft: Path) -> Rig:
    made = Rig(
        shared_tiny(target).path,
        dtype=torch.float32,
        kernels=NATIVE,
        num_threads=1,
        context_length=256,
        draft_model=draft,
    )
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text", "gemma4_text"])
def known(request: pytest.FixtureRequest) -> Known:
    """A model that drafts for itself, and models of states and of windows for which it drafts."""
    return known_of(rig_of(request.param, shared_tiny("llama").path))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"width-{shape['width']}")
def test_c16_a_draft_model_changes_no_bit_in_any_shape_of_the_engine(known: Known, shape: dict[str, Any]) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    engine = engine_of(known.rig, **shape)
    for apart in (0, 2):
        known.check(engine, apart=apart)
    assert engine.count("draft_tokens") > engine.count("accepted_tokens")
    assert ("num_tokens" not in shape) or engine.count("retractions") > 0


def test_a_draft_model_that_is_right_is_accepted_whole_whatever_is_in_the_cache() -> None:
    rig, width = rig_of("llama", shared_tiny("llama").path), 4
    plain, _ = run_steps(rig.engine(), 41)
    engine = engine_of(rig, width=width, page_size=1, radix_cache=True)
    for _ in range(2):
        tokens, steps = run_steps(engine, 41)
        assert tokens == plain
        assert steps == 1 + 40 // width


def test_c16_drafts_that_are_no_numbers_cost_acceptance_alone() -> None:
    known = known_of(rig_of("llama", shared_tiny("llama").path))
    engine = engine_of(known.rig, width=4, radix_cache=True)
    engine.core._runner.proposer.drafting.model._blocks[1]._sublayers[0].before.of.keywords["weight"].fill_(
        float("nan")
    )
    known.check(engine)
    assert engine.count("draft_tokens") > 0


def test_a_draft_model_with_mrope_beside_one_without_changes_no_token() -> None:
    known = known_of(rig_of("llama", shared_visual("qwen3_vl").path))
    engine = engine_of(known.rig, width=4, radix_cache=True)
    known.check(engine)
    assert engine.count("draft_tokens") > 0
