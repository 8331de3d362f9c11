"""C16, C17 with EAGLE heads: tokens and log-probabilities are those of plain decoding to the bit, whatever they draft
and whatever is around a request; and a head that is right is believed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.rig import Rig
from tests.integration.test_draft_heads import SHAPES, engine_of, known_of, run_steps
from tests.integration.test_hybrid_tokens import Known
from tests.kernels import NATIVE
from tests.models.eagles import load_head, make_head, make_right, make_target

KINDS = pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])


def rig_of(target: Path, draft: Path, *, third: bool) -> Rig:
    made = Rig(
        target,
        dtype=torch.float32,
        kernels=NATIVE,
        num_threads=1,
        context_length=256,
        draft=partial(load_head, draft, third=third),
    )
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.mark.slow
@pytest.mark.quick(1)
@KINDS
def test_c16_an_untrained_eagle_head_changes_no_bit(third: bool, tmp_path: Path) -> None:
    make_head(make_target(tmp_path), tmp_path / "draft", third=third)
    known = known_of(rig_of(tmp_path, tmp_path / "draft", third=third))
    known.check(engine_of(known.rig, width=4, page_size=4))


@pytest.fixture(scope="module", params=[False, True], ids=["eagle", "eagle3"])
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """With a head that mostly is."""
    made = make_right(tmp_path_factory.mktemp("right"), third=request.param, wrong=0.03)
    return known_of(rig_of(*made, third=request.param))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"width-{shape['width']}")
def test_c16_an_eagle_head_changes_no_bit_in_any_shape_of_the_engine(right: Known, shape: dict[str, Any]) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    engine = engine_of(right.rig, **shape)
    for apart in (0, 2):
        right.check(engine, apart=apart)
    assert engine.count("draft_tokens") > engine.count("accepted_tokens") > 0
    assert ("num_tokens" not in shape) or engine.count("retractions") > 0


@pytest.mark.quick(1)
@KINDS
def test_an_eagle_head_that_is_right_is_accepted_whole(third: bool, tmp_path: Path) -> None:
    rig, width = rig_of(*make_right(tmp_path, third=third), third=third), 4
    plain, _ = run_steps(rig.engine(), 41)
    tokens, steps = run_steps(engine_of(rig, width=width), 41)
    assert tokens == plain
    assert steps == 1 + 40 // width
