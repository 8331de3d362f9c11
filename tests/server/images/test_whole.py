"""The whole image as one tile: Mistral 3. Pixels are those of transformers' processor with Pillow, to the byte."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from forebay.base.errors import ModelError
from forebay.families.config.vision.pixtral import PixtralConfig
from forebay.server.images.cutting import tiles_of
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.base import ONE_TILE
from forebay.server.images.tilings.whole import BREAK, END, LOW_EDGE, WholeImage
from tests.server.images.extracted import extracted
from tests.server.images.smolvlm import file_of, noise
from tests.server.images.test_pixels import files

VISION = PixtralConfig(
    kind="mistral3",
    placeholder=5,
    patch_size=14,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-5,
    image_size=1540,
    theta=10_000.0,
    gelu=False,
    projector_bias=False,
)
WHOLE = tiling_of("/nowhere", VISION)
assert isinstance(WHOLE, WholeImage)
SMALL = msgspec.structs.replace(WHOLE, token_edge=16, max_size=(96, 96))
WIDE = msgspec.structs.replace(SMALL, max_size=(64, 128))
SIZES = ((1, 1), (1, 60), (60, 1), (511, 513), (513, 511), (96, 96), (97, 40), (200, 100), (16, 32), (31, 33))


def expected(content: bytes, tiling: WholeImage) -> np.ndarray:
    height, width = tiling.max_size
    processor = PixtralImageProcessorPil(
        size={"longest_edge": height} if height == width else {"height": height, "width": width},
        patch_size={"height": tiling.token_edge, "width": tiling.token_edge},
        resample=tiling.resample,
        do_rescale=False,
        do_normalize=False,
    )
    made = processor(ImageOps.exif_transpose(Image.open(BytesIO(content))))
    (pixels,) = made["pixel_values"]
    assert pixels.dtype == np.uint8
    return np.moveaxis(pixels, 0, -1)


def check(content: bytes, tiling: WholeImage) -> None:
    wanted, found = expected(content, tiling), tiles_of(content, tiling, splits=True)
    assert (found.grid, found.sizes) == (ONE_TILE, (wanted.shape[:2],))
    assert found.pixels == wanted.tobytes()


@pytest.mark.parametrize("tiling", [WHOLE, SMALL, WIDE], ids=["large", "small", "wide"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_of_any_size_equal_those_of_transformers(size: tuple[int, int], tiling: WholeImage) -> None:
    check(file_of(noise(*size)), tiling)


@pytest.mark.parametrize("name", files())
def test_pixels_of_any_mode_and_orientation_equal_those_of_transformers(name: str) -> None:
    check(files()[name], SMALL)


@pytest.mark.parametrize("resample", [0, 1, 2, 4, 5])
def test_pixels_with_another_filter_equal_those_of_transformers(resample: int) -> None:
    check(file_of(noise(170, 90)), msgspec.structs.replace(SMALL, resample=resample))


def test_image_that_is_much_longer_than_wide_has_a_token_on_its_shorter_edge() -> None:
    assert tiles_of(file_of(noise(4000, 1)), SMALL, splits=True).sizes == ((96, 16),)


def test_image_of_low_detail_is_smaller() -> None:
    content = file_of(noise(900, 1400))
    assert tiles_of(content, WHOLE, splits=True).sizes == ((924, 1400),)
    assert tiles_of(content, WHOLE, splits=False).sizes == WHOLE_LOW
    assert tiles_of(content, SMALL, splits=False) == tiles_of(content, SMALL, splits=True)


WHOLE_LOW = ((336, 532),)  # of 329 x 512
assert max(WHOLE_LOW[0]) < LOW_EDGE + WHOLE.token_edge


@pytest.mark.parametrize("size", [(28, 28), (28, 84), (84, 28), (308, 224)], ids=str)
def test_text_of_an_image_equals_that_of_transformers(size: tuple[int, int]) -> None:
    marks = {"image_break_token": BREAK, "image_end_token": END}
    processor: Any = SimpleNamespace(patch_size=14, spatial_merge_size=2, image_token="[IMG]", **marks)
    oracle = extracted("pixtral.processing_pixtral", "PixtralProcessor", ["replace_image_token"])
    text = oracle.replace_image_token(processor, {"image_sizes": [size]}, 0)
    assert WHOLE.text_of(ONE_TILE, (size,), "[IMG]") == text


@pytest.mark.parametrize(
    ("own", "processor", "why"),
    [
        ({"size": {"longest_edge": 1541}}, {}, "images have up to 1541 pixels, and the encoder takes 1540"),
        ({"size": 1540}, {}, "size is 1540, without a longest_edge or a height and a width in pixels"),
        ({"size": {"height": 0, "width": 5}}, {}, "without a longest_edge"),
        ({"resample": 9}, {}, "not one of Pillow's filters"),
        ({}, {"patch_size": 16}, "patch_size of the processor is 16; the encoder has 14"),
        ({}, {"spatial_merge_size": 1}, "spatial_merge_size of the processor is 1; the encoder has 2"),
        ({}, {"image_end_token": 3}, "image_end_token is 3, not a token"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    own: dict[str, Any], processor: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=why):
        tiling_of(str(tmp_path), VISION)


def test_parameters_are_read(tmp_path: Path) -> None:
    own = {"size": {"longest_edge": 1024}, "resample": 2, "patch_size": {"height": 14, "width": 14}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    processor = {"patch_size": 14, "spatial_merge_size": 2, "image_break_token": "<b>", "image_end_token": "<e>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    changes = {"max_size": (1024, 1024), "resample": 2, "line_end": "<b>", "end": "<e>"}
    assert tiling_of(str(tmp_path), VISION) == msgspec.structs.replace(WHOLE, **changes)
