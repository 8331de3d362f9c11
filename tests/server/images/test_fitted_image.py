"""Images of Qwen: one tile, equal to transformers' processor to the byte, and its tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from forebay.base.errors import ModelError
from forebay.families.config.vision.qwen import QwenConfig
from forebay.families.config.vision.qwen2 import Qwen2Config
from forebay.families.config.vision.qwen3 import Qwen3Config
from forebay.server.images.cutting import tiles_of
from forebay.server.images.frames import Decode, encode
from forebay.server.images.sources import Unreadable
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.qwen import LOW_PIXELS, FittedImage, fitted
from tests.server.images.smolvlm import file_of, noise

VISION = Qwen3Config(
    kind="qwen3_vl",
    placeholder=5,
    patch_size=8,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
    side=4,
    rope_theta=10_000.0,
    depth=2,
    deepstack=(0,),
    output_size=16,
    min_pixels=4 * 256,
    max_pixels=60 * 256,
)
QWEN2_VISION = Qwen2Config(
    kind="qwen2_5_vl",
    placeholder=5,
    patch_size=14,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    depth=2,
    output_size=16,
    min_pixels=4 * 28**2,
    max_pixels=60 * 28**2,
    window=4,
    whole=frozenset({1}),
    gated=True,
)
EDGE = VISION.token_edge
SIZES = ((1, 1), (1, 150), (150, 1), (13, 511), (513, 511), (90, 91), (16, 16), (7, 8), (24, 40), (200, 2000))


def tiling(vision: QwenConfig = VISION, **changes: int) -> FittedImage:
    made = tiling_of("/nowhere", vision)
    assert isinstance(made, FittedImage)
    return msgspec.structs.replace(made, **changes)


def expected(content: bytes, own: FittedImage, vision: QwenConfig) -> np.ndarray:
    """The pixels of transformers, uint8 [height, width, 3]."""
    size, merge = vision.patch_size, vision.merge
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": own.min_pixels, "longest_edge": own.max_pixels},
        patch_size=size,
        merge_size=merge,
        resample=own.resample,
        do_rescale=False,
        do_normalize=False,
    )
    made = processor(Image.open(BytesIO(content)).convert("RGB"), return_tensors="np")
    _, rows, columns = made["image_grid_thw"][0]
    patches = made["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, 2, size, size)
    assert (patches[..., 0, :, :] == patches[..., 1, :, :]).all()
    image = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * size, columns * size, 3)
    assert (image == image.astype(np.uint8)).all()
    return image.astype(np.uint8)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("vision", [VISION, QWEN2_VISION], ids=lambda vision: vision.kind)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tile_of_any_size_equals_that_of_transformers(size: tuple[int, int], vision: QwenConfig, resample: int) -> None:
    own, content = tiling(vision, resample=resample), file_of(noise(*size))
    pixels, found = expected(content, own, vision), tiles_of(content, own, splits=True)
    height, width, _ = pixels.shape
    assert (found.grid, found.sizes) == ((height // own.token_edge, width // own.token_edge), ((height, width),))
    assert found.pixels == pixels.tobytes()


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    edge=st.sampled_from([28, 32]),
    least=st.integers(1, 1 << 18),
    more=st.integers(0, 1 << 24),
)
def test_fitted_sizes_are_those_of_transformers(height: int, width: int, edge: int, least: int, more: int) -> None:
    try:
        wanted = smart_resize(height, width, factor=edge, min_pixels=least, max_pixels=least + more)
    except ValueError:
        with pytest.raises(Unreadable, match="one edge may have at most 200 times as many as the other"):
            fitted((height, width), edge, least, least + more)
        return
    assert fitted((height, width), edge, least, least + more) == wanted


@example(height=15_400, width=77, least=65_536, more=938_000)
@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    least=st.integers(1, 1 << 18),
    more=st.integers(EDGE**2, 1 << 20),
)
def test_engine_takes_what_the_server_cuts(height: int, width: int, least: int, more: int) -> None:
    vision = replace(VISION, min_pixels=least, max_pixels=least + more)
    try:
        size = fitted((height, width), EDGE, vision.min_pixels, vision.max_pixels)
    except Unreadable:
        return
    assert max(size) <= vision.max_edge
    assert 0 < vision.num_tokens(size) <= vision.max_tokens


@pytest.mark.slow
def test_request_for_few_tokens_gets_few() -> None:
    own = tiling(max_pixels=1 << 24)
    content = file_of(noise(1200, 900))
    ((height, width),) = tiles_of(content, own, splits=False).sizes
    assert height * width <= LOW_PIXELS < 1200 * 900
    ((height, width),) = tiles_of(content, own, splits=True).sizes
    assert height * width > LOW_PIXELS
    small = tiling()
    assert tiles_of(content, small, splits=False) == tiles_of(content, small, splits=True)


def test_text_is_a_placeholder_for_each_token() -> None:
    assert tiling().text_of((3, 2), ((3 * EDGE, 2 * EDGE),), "<|image_pad|>") == "<|image_pad|>" * 6


def test_parameters_reach_the_process_that_decodes() -> None:
    own = tiling()
    assert msgspec.msgpack.decode(encode(Decode(b"x", "", 3, own, True)), type=Decode).tiling == own


def test_filter_is_that_of_the_file(tmp_path: Path) -> None:
    for fields, resample in (({}, 3), ({"resample": 2}, 2)):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        assert tiling_of(str(tmp_path), VISION).resample == resample
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 9}))
    with pytest.raises(ModelError, match="resample is 9"):
        tiling_of(str(tmp_path), VISION)
