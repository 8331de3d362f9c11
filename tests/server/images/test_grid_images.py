"""Images of Kimi K2.5 and of Muse Glimmer: one tile of the image's own ratio, with transformers' sizes.

Its image processors need torchvision. Of that they use the resizing of bytes: bicubic as torch has it, which rounds
otherwise than Pillow, and Lanczos as Pillow has it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of
from forebay.families.config.vision.kimi_k25 import KimiVisionConfig
from forebay.families.config.vision.muse_glimmer import MuseVisionConfig
from forebay.server.images.cutting import tiles_of
from forebay.server.images.sources import Unreadable
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.base import ONE_TILE
from forebay.server.images.tilings.kimi_k25 import PaddedImage
from forebay.server.images.tilings.muse_glimmer import ClosestImage, closest
from tests.families.test_outer import fields_of
from tests.server.images.extracted import extracted
from tests.server.images.smolvlm import file_of, noise

KIMI, MUSE = (config_of(fields_of(kind)).vision for kind in ("kimi_k25", "muse_glimmer"))
assert isinstance(KIMI, KimiVisionConfig)
assert isinstance(MUSE, MuseVisionConfig)
PADDED = PaddedImage(placeholder=3, token_edge=28, patch_size=14, max_patches=16_384, max_side=512)
CLOSEST = ClosestImage(placeholder=3, token_edge=28, max_tokens=4096)
SMALL = msgspec.structs.replace(PADDED, max_patches=40, max_side=12)
SIZES: Final = ((1, 1), (1, 60), (60, 1), (27, 29), (28, 56), (140, 70), (200, 333), (500, 90), (90, 700), (13, 13))


@cache
def navit_resize() -> Any:
    names = ("navit_resize", "get_number_of_image_patches")
    owner = extracted("kimi_k25.image_processing_kimi_k25", "Kimi_K25ImageProcessor", names)
    return owner.get_number_of_image_patches.__globals__["navit_resize"]


@cache
def smart_resize() -> Any:
    names = ("smart_resize", "get_number_of_image_patches")
    owner = extracted("muse_glimmer.image_processing_muse_glimmer", "MuseGlimmerImageProcessor", names)
    return owner.get_number_of_image_patches.__globals__["smart_resize"]


def kimi_sizes(height: int, width: int, tiling: PaddedImage) -> Any:
    """The sizes of transformers: the image's, and the tile's."""
    merge = tiling.token_edge // tiling.patch_size
    return navit_resize()(height, width, tiling.patch_size, merge, tiling.max_patches, tiling.max_side)


@pytest.mark.whole
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tile_of_kimi_is_that_of_transformers_but_for_roundings(size: tuple[int, int]) -> None:
    pixels = noise(*size)
    for tiling in (PADDED, SMALL):
        found = tiles_of(file_of(pixels), tiling, splits=True)
        resized, filled = kimi_sizes(*size, tiling)
        assert (found.grid, found.sizes) == (ONE_TILE, (filled,))
        tile = np.frombuffer(found.pixels, np.uint8).reshape(*filled, 3)
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()[None]
        made = F.interpolate(image, size=resized, mode="bicubic", align_corners=False, antialias=True)
        theirs = F.pad(made, (0, filled[1] - resized[1], 0, filled[0] - resized[0]))[0].permute(1, 2, 0).numpy()
        assert np.abs(tile.astype(int) - theirs).max() <= 2
        assert not tile[resized[0] :].any()
        assert not tile[:, resized[1] :].any()


def test_any_image_of_kimi_has_the_size_of_transformers_within_the_encoders_limits() -> None:
    assert isinstance(KIMI, KimiVisionConfig)
    rng = np.random.default_rng(0)
    small = replace(KIMI, most_patches=40, most_of_a_side=12)
    for height, width in rng.integers(1, 9000, (2000, 2)).tolist():
        for tiling, vision in ((PADDED, KIMI), (SMALL, small)):
            resized, filled = kimi_sizes(height, width, tiling)
            assert tiling.scaled((height, width), tiling.max_patches) == resized
            assert vision.num_tokens(filled) <= vision.max_tokens
            assert max(filled) <= vision.max_edge


@pytest.mark.whole
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tile_of_muse_glimmer_is_that_of_transformers(size: tuple[int, int]) -> None:
    pixels = noise(*size)
    height, width = smart_resize()(*size, 28, 4096)
    found = tiles_of(file_of(pixels), CLOSEST, splits=True)
    assert (found.grid, found.sizes) == (ONE_TILE, ((height, width),))
    assert found.pixels == Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS).tobytes()


def test_any_image_of_muse_glimmer_has_the_size_of_transformers() -> None:
    rng = np.random.default_rng(1)
    sizes = [*rng.integers(1, 9000, (2000, 2)).tolist(), *((edge, edge) for edge in range(1, 500, 7))]
    for height, width in sizes:
        for most in (4096, 30):
            theirs = smart_resize()(height, width, 28, most)
            if theirs[0] * theirs[1] > most * 28**2:
                with pytest.raises(Unreadable, match=f"more than the {most} of an image"):
                    closest((height, width), 28, most)
            else:
                assert closest((height, width), 28, most) == theirs


@pytest.mark.slow
def test_image_of_low_detail_has_few_tokens() -> None:
    content = file_of(noise(900, 1200))
    for tiling, tokens in ((PADDED, 17 * 22), (CLOSEST, 16 * 20)):
        (size,) = tiles_of(content, tiling, splits=False).sizes
        assert abs(tiling.num_tokens(size) - tokens) < 40
        assert tiling.num_tokens(size) < tiling.num_tokens(tiles_of(content, tiling, splits=True).sizes[0])


def test_text_has_a_placeholder_for_each_token() -> None:
    assert PADDED.text_of(ONE_TILE, ((28, 84),), "x") == "xxx"
    assert CLOSEST.text_of(ONE_TILE, ((28, 84),), "x") == "<|image_start|>xxx<|image_end|>"


def test_tiling_follows_from_the_encoder(tmp_path: Path) -> None:
    assert tiling_of(str(tmp_path), KIMI) == PADDED
    assert tiling_of(str(tmp_path), MUSE) == CLOSEST


@pytest.mark.parametrize("vision", [KIMI, MUSE], ids=["kimi_k25", "muse_glimmer"])
@pytest.mark.parametrize(("own", "why"), [({"resample": 9}, "resample"), ({"do_resize": False}, "do_resize")])
def test_parameters_of_an_image_processor_that_are_not_served_are_named(
    vision: Any, own: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match=why):
        tiling_of(str(tmp_path), vision)
