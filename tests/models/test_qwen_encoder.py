"""Qwen3-VL's encoder gives the encodings and the features of transformers for an image of any size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.layers.grid_encoder import taps
from forebay.models.encoder import load_encoder
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from tests.models.visual import NUM_LAYERS, VisualModel, oracle_features, shared_visual

HIDDEN = 48  # of the language model


@pytest.fixture(scope="module")
def model() -> VisualModel:
    return shared_visual("qwen3_vl")


def loaded(model: VisualModel, ops: Ops, dtype: torch.dtype = torch.float32) -> Encoder:
    return load_encoder(open_checkpoint(model.path), ops=ops, dtype=dtype, progress=lambda done, total: None)


def image(model: VisualModel, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """An image of so many tokens."""
    shape = (rows * model.token_edge, columns * model.token_edge, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode(encoder: Encoder, pixels: np.ndarray[Any, Any], cuts: tuple[int, ...] = ()) -> Tensor:
    state = encoder.begin(torch.from_numpy(pixels.copy()))
    for first, last in itertools.pairwise((0, *cuts, encoder.num_layers)):
        state = encoder.layers(state, first, last)
    return encoder.finish(state)


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (7, 1), (2, 3), (5, 4)])
def test_encodings_and_features_equal_those_of_transformers(
    model: VisualModel, ops: Ops, grid: tuple[int, int]
) -> None:
    encoder, pixels = loaded(model, ops), image(model, *grid)
    encoding = encode(encoder, pixels)
    assert encoding.shape == (grid[0] * grid[1], encoder.row_size) == (grid[0] * grid[1], 3 * HIDDEN)
    (expected,) = oracle_features(model.oracle, [pixels])
    torch.testing.assert_close(encoding, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
def test_slices_give_the_bits_of_the_whole(model: VisualModel, ops: Ops, cuts: tuple[int, ...]) -> None:
    encoder, pixels = loaded(model, ops), image(model, 2, 3)
    assert encoder.num_layers == NUM_LAYERS
    assert torch.equal(encode(encoder, pixels, cuts), encode(encoder, pixels))


def test_layers_leave_their_arguments(model: VisualModel, ops: Ops) -> None:
    encoder = loaded(model, ops)
    state = encoder.layers(encoder.begin(torch.from_numpy(image(model, 2, 3))), 0, 1)
    before = State(state.x.clone(), state.grid, tuple(feature.clone() for feature in state.features))
    encoder.layers(state, 1, 3)
    assert torch.equal(state.x, before.x)
    assert len(state.features) == 1
    assert torch.equal(state.features[0], before.features[0])


def test_bits_do_not_depend_on_earlier_images_nor_on_threads(model: VisualModel, native: Ops) -> None:
    images = [image(model, rows, columns) for rows, columns in ((2, 3), (3, 2), (1, 5))]
    for dtype in (torch.float32, torch.bfloat16):
        encoder = loaded(model, native, dtype)
        forwards = [encode(encoder, pixels) for pixels in images]
        for pixels, encoding in zip(reversed(images), reversed(forwards), strict=True):
            assert torch.equal(encode(loaded(model, make_ops("native", 1), dtype), pixels), encoding)


@pytest.mark.parametrize("side", [1, 4, 48])
@pytest.mark.parametrize("count", [1, 2, 5, 48, 131])
def test_taps_interpolate_with_aligned_corners(side: int, count: int) -> None:
    table = torch.randn(1, 1, side, generator=torch.Generator().manual_seed(side))
    wanted = F.interpolate(table, size=count, mode="linear", align_corners=True)[0, 0]
    found = sum(weights * table[0, 0, places] for places, weights in zip(*taps(count, side), strict=True))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
