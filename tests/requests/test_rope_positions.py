"""Rotary positions of prompts with pictures, as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from forebay.requests.rope_positions import GridRun, rope_delta, rope_positions

MERGE = 2  # patches along an edge of a token

# Tokens of text before each picture, and its rows and columns.
pictures = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7)), max_size=4)


def runs_of(drawn: list[tuple[int, int, int]]) -> list[GridRun]:
    runs, at = [], 0
    for text, rows, columns in drawn:
        runs.append(GridRun(at + text, rows, columns))
        at = runs[-1].stop
    return runs


def oracle(model: Any, runs: list[GridRun], length: int) -> tuple[np.ndarray, int]:
    """The positions [3, length] of a prompt, and the delta behind it."""
    kinds = torch.zeros(1, length, dtype=torch.int32)
    for run in runs:
        kinds[0, run.start : run.stop] = 1
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    itself = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    itself.get_vision_position_ids = lambda *args, **options: model.get_vision_position_ids(itself, *args, **options)
    grids = torch.tensor([[1, MERGE * run.rows, MERGE * run.columns] for run in runs]) if runs else None
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, delta = model.get_rope_index(itself, ids, kinds, image_grid_thw=grids)
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model])
@given(drawn=pictures, behind=st.integers(0, 5), data=st.data())
def test_rope_positions_of_any_chunk_equal_transformers(
    model: Any, drawn: list[tuple[int, int, int]], behind: int, data: st.DataObject
) -> None:
    runs = runs_of(drawn)
    length = (runs[-1].stop if runs else 1) + behind
    positions, delta = oracle(model, runs, length)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    np.testing.assert_array_equal(rope_positions(runs, start, stop), positions[:, start:stop])
    assert rope_delta(runs) == delta


@given(drawn=pictures, count=st.integers(1, 5))
def test_tokens_behind_a_prompt_stand_at_their_place_plus_the_delta(
    drawn: list[tuple[int, int, int]], count: int
) -> None:
    """Generated tokens of a retracted request are computed as a prompt is."""
    runs = runs_of(drawn)
    end = runs[-1].stop if runs else 0
    expected = np.tile(np.arange(end, end + count) + rope_delta(runs), (3, 1))
    np.testing.assert_array_equal(rope_positions(runs, end, end + count), expected)
    assert rope_delta(runs) <= 0
