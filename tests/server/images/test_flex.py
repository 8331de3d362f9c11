"""Tiles of any ratio, and their tokens: LFM2-VL. Sizes and grids are those of transformers' image processor.

That needs torchvision, of which it uses the resizing of bytes: torch has the same kernel, which rounds otherwise than
Pillow.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from forebay.base.errors import ModelError
from forebay.base.pixels import num_pixel_bytes
from forebay.families.config.vision.siglip2 import Siglip2Config
from forebay.server.images.cutting import tiles_of
from forebay.server.images.sources import Unreadable
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.base import ONE_TILE, Tiles
from forebay.server.images.tilings.flex import END, START, WHOLE, FlexTiles
from tests.server.images.extracted import extracted
from tests.server.images.smolvlm import file_of, noise

VISION = Siglip2Config(
    kind="lfm2_vl",
    placeholder=5,
    patch_size=16,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
    position_side=16,
    most_tokens=256,
    projector_size=32,
    projector_norm=True,
    projector_bias=True,
)
FLEX = tiling_of("/nowhere", VISION)
assert isinstance(FLEX, FlexTiles)
SMALL = msgspec.structs.replace(FLEX, tile_size=64, min_tokens=2, max_tokens=6)
SIZES = ((1, 1), (1, 60), (60, 1), (511, 513), (513, 511), (512, 512), (700, 900), (1500, 400), (90, 4000), (725, 724))
GEOMETRY = (
    *("round_by_factor", "find_closest_aspect_ratio"),
    *("_target_ratios", "_get_grid_layout", "smart_resize", "_is_image_too_large"),
)


@cache
def oracle() -> Any:
    """transformers' image processor without what needs torchvision."""
    return extracted("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor", GEOMETRY)()


def expected_sizes(height: int, width: int, tiling: FlexTiles) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The grid and the sizes of the tiles."""
    patches = {"encoder_patch_size": tiling.patch_size, "downsample_factor": tiling.token_edge // tiling.patch_size}
    limits = {"height": height, "width": width, "max_image_tokens": tiling.max_tokens, **patches}
    whole = oracle().smart_resize(min_image_tokens=tiling.min_tokens, **limits)[::-1]
    if not oracle()._is_image_too_large(max_pixels_tolerance=tiling.tolerance, **limits):
        return ONE_TILE, [whole]
    cols, rows, *_ = oracle()._get_grid_layout(height, width, tiling.min_tiles, tiling.max_tiles, tiling.tile_size)
    return (rows, cols), [(tiling.tile_size, tiling.tile_size)] * (rows * cols) + [whole]


def resized(pixels: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """torch's resizing of uint8 [height, width, 3], as torchvision calls it."""
    image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()[None]
    made = F.interpolate(image, size=size, mode="bilinear", align_corners=False, antialias=True)
    return made[0].permute(1, 2, 0)


def arrays(tiles: Tiles) -> list[np.ndarray]:
    found, at = [], 0
    for size in tiles.sizes:
        stop = at + num_pixel_bytes([size])
        found.append(np.frombuffer(tiles.pixels[at:stop], np.uint8).reshape(*size, 3))
        at = stop
    assert at == len(tiles.pixels)
    return found


FEW = msgspec.structs.replace(SMALL, min_tiles=3, max_tiles=7)


@pytest.mark.parametrize("tiling", [FLEX, SMALL, FEW], ids=["large", "small", "few"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_have_the_sizes_of_transformers(size: tuple[int, int], tiling: FlexTiles) -> None:
    grid, sizes = expected_sizes(*size, tiling)
    if tiling.num_tokens(sizes[-1]) > max(tiling.max_tokens, tiling.num_tokens((tiling.tile_size,) * 2)):
        with pytest.raises(Unreadable, match="crop it to a smaller ratio"):
            tiles_of(file_of(noise(*size)), tiling, splits=True)
        return
    found = tiles_of(file_of(noise(*size)), tiling, splits=True)
    assert (found.grid, list(found.sizes)) == (grid, sizes)


def test_any_size_has_the_grid_and_the_whole_of_transformers() -> None:
    rng = np.random.default_rng(0)
    split = 0
    for height, width in rng.integers(1, 3000, (2000, 2)).tolist():
        grid, sizes = expected_sizes(height, width, FLEX)
        assert FLEX.whole(height, width) == sizes[-1]
        assert FLEX._is_large(height, width) == (grid != ONE_TILE)
        if grid != ONE_TILE:
            split += 1
            assert FLEX.grid(height, width) == grid
    assert 100 < split < 2000


@pytest.mark.parametrize("size", [(50, 70), (100, 300), (33, 257)], ids=str)
def test_pixels_differ_by_a_rounding_from_those_of_torch(size: tuple[int, int]) -> None:
    pixels = noise(*size)
    found = tiles_of(file_of(pixels), SMALL, splits=True)
    *tiles, whole = arrays(found)
    wanted = [resized(pixels, whole.shape[:2])]
    if tiles:
        (rows, cols), edge = found.grid, SMALL.tile_size
        large = resized(pixels, (rows * edge, cols * edge))
        wanted += [band for row in large.split(edge) for band in row.split(edge, 1)]
    for ours, theirs in zip([whole, *tiles], wanted, strict=True):
        distance = (torch.from_numpy(ours.copy()).int() - theirs.int()).abs()
        assert distance.max() <= 1
        assert (distance > 0).float().mean() < 0.02


def test_image_that_is_not_split_is_one_tile() -> None:
    content = file_of(noise(700, 900))
    assert len(tiles_of(content, FLEX, splits=True).sizes) == 2 * 3 + 1
    for tiling, splits in ((FLEX, False), (msgspec.structs.replace(FLEX, splits=False), True)):
        found = tiles_of(content, tiling, splits=splits)
        assert (found.grid, found.sizes) == (ONE_TILE, (FLEX.whole(700, 900),))
    bare = msgspec.structs.replace(FLEX, thumbnail=False)
    assert set(tiles_of(content, bare, splits=True).sizes) == {(512, 512)}


def test_image_that_is_too_long_for_its_width_is_refused_with_the_numbers() -> None:
    with pytest.raises(Unreadable, match=r"has 60000 x 1 pixels, of which 3919 tokens would be made; .* at most 256"):
        tiles_of(file_of(noise(1, 60000)), FLEX, splits=True)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("thumbnail", [True, False])
@pytest.mark.parametrize("grid", [ONE_TILE, (1, 2), (3, 2)], ids=str)
def test_text_of_tiles_equals_that_of_transformers(grid: tuple[int, int], thumbnail: bool, marks: bool) -> None:
    tiling = msgspec.structs.replace(FLEX, thumbnail=thumbnail, marks=marks)
    whole, (rows, cols) = (320, 448), grid
    sizes = ((512, 512),) * (rows * cols) + ((whole,) if thumbnail or grid == ONE_TILE else ())
    names = {"image_start_token": START, "image_end_token": END, "image_thumbnail_token": WHOLE}
    processor: Any = SimpleNamespace(image_token="<image>", **names)
    text = Lfm2VlProcessor._build_image_tokens(processor, rows, cols, 256, 140, thumbnail, marks)
    assert tiling.text_of(grid, sizes, "<image>") == text


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"tile_size": 500}, "tiles have 500 pixels, which are no multiple of the 32 of a token"),
        ({"encoder_patch_size": 14}, "encoder_patch_size is 14; the encoder has 16"),
        ({"downsample_factor": 3}, "downsample_factor is 3; the encoder has 2"),
        ({"min_tiles": 11}, "min_tiles is 11, more than the 10 of max_tiles"),
        ({"max_tiles": 100}, "max_tiles of the image processor is 100, not a whole number to 64"),
        ({"max_pixels_tolerance": "2"}, "max_pixels_tolerance is '2', not a number above 0"),
        ({"resample": 9}, "not one of Pillow's filters"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(own: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match=why):
        tiling_of(str(tmp_path), VISION)


def test_parameters_are_read(tmp_path: Path) -> None:
    own = {"tile_size": 64, "max_image_tokens": 6, "do_image_splitting": False, "use_thumbnail": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    (tmp_path / "processor_config.json").write_text(json.dumps({"use_image_special_tokens": False}))
    found = tiling_of(str(tmp_path), VISION)
    changes = {"tile_size": 64, "max_tokens": 6, "splits": False, "thumbnail": False, "marks": False}
    assert found == msgspec.structs.replace(FLEX, **changes)
