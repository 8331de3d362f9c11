"""Images of InternVL: squares in a grid of about the image's ratio, and all of it as one more."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from forebay.base.errors import ModelError
from forebay.families.config.vision.internvl import InternVitConfig
from forebay.server.images.cutting import tiles_of
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.internvl import GridTiles
from tests.server.images.smolvlm import file_of, noise
from tests.server.images.test_pixels import SIZES, files

EDGE = 32
VISION = InternVitConfig(
    kind="internvl",
    placeholder=7,
    image_size=EDGE,
    patch_size=8,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
    bias=True,
    head_norm=False,
    rms_norm=False,
    last_norm=False,
)
TILING = GridTiles(placeholder=7, token_edge=16, tile_size=EDGE, min_tiles=1, max_tiles=12)
SIDES = {"height": EDGE, "width": EDGE}


def check(content: bytes, tiling: GridTiles, *, splits: bool = True) -> None:
    processor = GotOcr2ImageProcessorPil(
        size=SIDES,
        do_rescale=False,
        do_normalize=False,
        crop_to_patches=splits,
        min_patches=tiling.min_tiles,
        max_patches=tiling.max_tiles,
    )
    made = processor(ImageOps.exif_transpose(Image.open(BytesIO(content))))["pixel_values"]
    tiles = np.stack([np.moveaxis(tile, 0, -1) for tile in made])
    found = tiles_of(content, tiling, splits=splits)
    rows, cols = found.grid
    assert tiles.dtype == np.uint8
    assert len(tiles) == (rows * cols + 1 if rows else 1)
    assert found.sizes == ((EDGE, EDGE),) * len(tiles)
    assert found.pixels == tiles.tobytes()


@pytest.mark.quick(8)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", [*SIZES, (64, 64), (96, 32), (31, 200)], ids=str)
def test_tiles_of_internvl_any_size_equal_those_of_transformers(size: tuple[int, int], splits: bool) -> None:
    check(file_of(noise(*size)), TILING, splits=splits)


@pytest.mark.parametrize("name", files())
def test_tiles_of_internvl_any_mode_equal_those_of_transformers(name: str) -> None:
    check(files()[name], TILING)


@pytest.mark.parametrize(("least", "most"), [(1, 4), (3, 6), (2, 2)])
def test_tiles_of_internvl_are_as_many_as_the_files_have(least: int, most: int) -> None:
    tiling = GridTiles(placeholder=7, token_edge=16, tile_size=EDGE, min_tiles=least, max_tiles=most)
    for size in ((70, 50), (300, 40), (32, 32)):
        check(file_of(noise(*size)), tiling)


def test_text_of_internvl_has_the_tokens_of_all_tiles_between_two_marks() -> None:
    assert TILING.text_of((1, 2), ((EDGE, EDGE),) * 3, "x") == f"<img>{'x' * 12}</img>"


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder)


def test_tiling_of_a_published_internvl(tmp_path: Path) -> None:
    """Its file has `crop_to_patches` false, which its processor overrides."""
    write(tmp_path, "processor_config.json", {"image_seq_length": 4, "processor_class": "InternVLProcessor"})
    own = {"crop_to_patches": False, "max_patches": 12, "min_patches": 1, "resample": 3, "size": SIDES}
    assert tiling_of(write(tmp_path, "preprocessor_config.json", own), VISION) == TILING


def test_tiling_of_internvl_without_files_follows_from_the_encoder(tmp_path: Path) -> None:
    assert tiling_of(str(tmp_path), VISION) == TILING


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"size": {"height": 448, "width": 448}}, "size is"),
        ({"size": {"shortest_edge": EDGE}}, "size is"),
        ({"max_patches": 65}, "max_patches"),
        ({"max_patches": "x"}, "max_patches"),
        ({"min_patches": 0}, "min_patches"),
        ({"min_patches": True}, "min_patches"),
        ({"min_patches": 5, "max_patches": 4}, "min_patches is 5"),
        ({"resample": 9}, "resample"),
    ],
)
def test_hostile_parameters_of_internvl_are_named(own: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why):
        tiling_of(write(tmp_path, "preprocessor_config.json", own), VISION)


def test_another_number_of_tokens_of_internvl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image_seq_length is 256; the encoder makes 4"):
        tiling_of(write(tmp_path, "processor_config.json", {"image_seq_length": 256}), VISION)
