"""Encoders of images of any size give the encodings and the features of transformers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.vision_utils import get_vision_window_index

from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.vision.qwen import QwenConfig
from forebay.layers.encoder import square_orders
from forebay.layers.grid_encoder import cubic_taps, interpolated, linear_taps, taps, window_order
from forebay.models.encoder import encoder_params, encoder_spec, load_encoder
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from tests.models.outers import OUTERS, save_as_published
from tests.models.visual import NUM_LAYERS, VisualModel, oracle_features, shared_visual

PARTS = {
    "kimi_k25": ("blocks.0.", "patch_embed.proj.", "mm_projector."),
    "muse_glimmer": ("layers.0.", "patch_embedding.", "vision_adapter.", "vision_projection."),
}
QWEN_PARTS = ("blocks.0.", "patch_embed.", "merger.", "deepstack_merger_list.")
HIDDEN = 48  # of the language model
FEATURES = {
    "kimi_k25": 0,
    "muse_glimmer": 0,
    "qwen2_5_vl": 0,
    "qwen2_vl": 0,
    "qwen3_vl": 2,
    "qwen4_exp": 0,
}  # of a token, beside its embedding


@pytest.fixture(scope="module", params=FEATURES)
def model(request: pytest.FixtureRequest) -> VisualModel:
    return shared_visual(request.param)


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


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (7, 1), (2, 3), (5, 4), (4, 4)])
def test_encodings_and_features_equal_those_of_transformers(
    model: VisualModel, ops: Ops, grid: tuple[int, int]
) -> None:
    encoder, pixels = loaded(model, ops), image(model, *grid)
    encoding = encode(encoder, pixels)
    row_size = HIDDEN * (1 + FEATURES[model.oracle.config.model_type])
    assert encoding.shape == (grid[0] * grid[1], encoder.row_size) == (grid[0] * grid[1], row_size)
    (expected,) = oracle_features(model.oracle, [pixels])
    torch.testing.assert_close(encoding, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
def test_slices_give_the_bits_of_the_whole(model: VisualModel, ops: Ops, cuts: tuple[int, ...]) -> None:
    encoder, pixels = loaded(model, ops), image(model, 5, 3)
    assert encoder.num_layers == NUM_LAYERS
    assert torch.equal(encode(encoder, pixels, cuts), encode(encoder, pixels))


def test_layers_leave_their_arguments(model: VisualModel, ops: Ops) -> None:
    encoder = loaded(model, ops)
    state = encoder.layers(encoder.begin(torch.from_numpy(image(model, 2, 3))), 0, 1)
    before = State(state.x.clone(), state.grid, tuple(feature.clone() for feature in state.features))
    encoder.layers(state, 1, 3)
    assert torch.equal(state.x, before.x)
    assert len(state.features) == min(1, FEATURES[model.oracle.config.model_type])
    assert all(map(torch.equal, state.features, before.features))


@pytest.mark.quick(1)
def test_bits_do_not_depend_on_earlier_images_nor_on_threads(model: VisualModel, native: Ops) -> None:
    images = [image(model, rows, columns) for rows, columns in ((2, 3), (3, 2), (1, 5))]
    for dtype in (torch.float32, torch.bfloat16):
        encoder = loaded(model, native, dtype)
        forwards = [encode(encoder, pixels) for pixels in images]
        for pixels, encoding in zip(reversed(images), reversed(forwards), strict=True):
            assert torch.equal(encode(loaded(model, make_ops("native", 1), dtype), pixels), encoding)


def test_interleaved_images_give_the_bits_of_each_alone(model: VisualModel, native: Ops) -> None:
    encoder = loaded(model, native)
    images = [image(model, rows, columns) for rows, columns in ((5, 3), (3, 5))]
    states = [encoder.layers(encoder.begin(torch.from_numpy(pixels)), 0, 1) for pixels in images]
    results = [encoder.finish(encoder.layers(state, 1, NUM_LAYERS)) for state in states]
    assert all(torch.equal(result, encode(encoder, pixels)) for result, pixels in zip(results, images, strict=True))


@pytest.mark.parametrize("window", [1, 2, 4, 9])
@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (8, 4), (5, 7), (3, 9)])
def test_window_order_is_that_of_transformers(grid: tuple[int, int], window: int) -> None:
    """Grids and windows are in tokens of 2 x 2 patches of a pixel."""
    (rows, columns), merge = grid, 2
    tokens, stops = get_vision_window_index(
        torch.tensor([[1, rows * merge, columns * merge]]), merge, window_size=window * merge, patch_size=1
    )
    of_tokens = square_orders(merge, "cpu")((rows * merge, columns * merge)).view(-1, merge**2)
    theirs = of_tokens[tokens].flatten().split(stops.diff().tolist())
    order, lens = window_order((rows * merge, columns * merge), window * merge)
    assert [part.tolist() for part in order.split(lens)] == [part.sort().values.tolist() for part in theirs]


def test_products_of_a_patch_are_those_of_the_matrices(model: VisualModel) -> None:
    config = open_checkpoint(model.path).config
    vision, matrices = config.vision, [param for param in encoder_params(config) if param.inner]
    assert vision is not None
    layer, patch, *mergers = PARTS.get(vision.kind, QWEN_PARTS)

    def elements(part: str) -> int:
        return sum(param.num_elements for param in matrices if f".{part}" in param.names[0])

    assert vision.layer_products == (elements(layer), 2 * vision.hidden_size)
    merged = sum(map(elements, mergers))
    assert vision.outer_products(HIDDEN) == elements(patch) // getattr(vision, "depth", 1) + merged // vision.merge**2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_tokens_of_another_width_than_the_language_model_has_are_refused(name: str) -> None:
    config = open_checkpoint(shared_visual(name).path).config
    assert isinstance(config.vision, QwenConfig)
    wrong = replace(config, vision=replace(config.vision, output_size=40))
    field = "hidden_size" if config.vision.kind == "qwen2_vl" else "out_hidden_size"
    with pytest.raises(ModelError, match=rf"has tokens of 40 numbers \({field}\), and the language model's"):
        encoder_spec(wrong)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_files_as_published_give_the_same_bits(name: str, native: Ops, tmp_path: Path) -> None:
    model = shared_visual(name)
    published = save_as_published(model.oracle, OUTERS[name], tmp_path)
    (published / "preprocessor_config.json").write_text((model.path / "preprocessor_config.json").read_text())
    pixels = image(model, 3, 5)
    assert any(name.startswith("visual.") for name in load_file(published / "model.safetensors"))
    other = replace(model, path=published)
    assert torch.equal(encode(loaded(other, native), pixels), encode(loaded(model, native), pixels))


@pytest.mark.parametrize("side", [1, 4, 48])
@pytest.mark.parametrize("count", [1, 2, 5, 48, 131])
def test_taps_interpolate_with_aligned_corners(side: int, count: int) -> None:
    table = torch.randn(1, 1, side, generator=torch.Generator().manual_seed(side))
    wanted = F.interpolate(table, size=count, mode="linear", align_corners=True)[0, 0]
    _, places, weights = taps(count, side)
    found = sum(weight * table[0, 0, place] for place, weight in zip(places, weights, strict=True))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", [1, 4, 32])
@pytest.mark.parametrize("count", [1, 3, 5, 33, 131])
def test_taps_between_places_of_equal_size_are_those_of_torch(side: int, count: int) -> None:
    """Cubic ones as of `interpolate`, and linear ones as of `grid_sample` with zeros around the table."""
    table = torch.randn(1, 1, side, side, generator=torch.Generator().manual_seed(side))
    cubic, linear = cubic_taps(count, side), linear_taps(count, side)
    wanted = F.interpolate(table, size=(count, count), mode="bicubic", align_corners=False)
    found = interpolated(table.view(-1, 1), cubic, cubic).view(1, 1, count, count)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    at = (torch.arange(count) + 0.5) * 2 / count - 1
    grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).unsqueeze(0)
    wanted = F.grid_sample(table, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    found = interpolated(table.view(-1, 1), linear, linear).view(1, 1, count, count)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
