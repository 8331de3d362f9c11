"""Images of Gemma 4: one tile of the image's own ratio, with as many tokens as there may be."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from forebay.base.errors import ModelError
from forebay.families.config.vision.gemma4 import Gemma4VisionConfig
from forebay.server.images.cutting import tiles_of
from forebay.server.images.decoding import CutImage
from forebay.server.images.expansion import Expansion
from forebay.server.images.frames import Decode, Decoded, encode
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.base import ONE_TILE
from forebay.server.images.tilings.gemma4 import LOW_TOKENS, ScaledImage, scaled
from forebay.text import tokenizer as text
from tests.server.images import test_gemma3
from tests.server.images.extracted import extracted
from tests.server.images.smolvlm import file_of, noise
from tests.server.images.test_pixels import SIZES, files

IMAGE, BEGIN, END = "<|image|>", "<|image>", "<image|>"
TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}\n\n<|image|>\n\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_turn>"
    "\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PATCH, MERGE = 4, 3
VISION = Gemma4VisionConfig(
    kind="gemma4",
    placeholder=5,
    begin=6,
    end=7,
    padding=0,
    patch_size=PATCH,
    merge=MERGE,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    theta=100.0,
    num_positions=420,
    most_tokens=140,
    clipped=False,
    standardized=False,
    bidirectional=True,
)
# As Gemma 4 publishes it, but for the numbers of patches.
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 140,
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 140,
    "patch_size": PATCH,
    "pooling_kernel_size": MERGE,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
TILING = ScaledImage(placeholder=5, token_edge=PATCH * MERGE, max_tokens=140, begin=6, end=7)


def write(folder: Path, own: dict[str, Any]) -> str:
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    return str(folder)


# Pixels.


def check(content: bytes, tiling: ScaledImage = TILING, *, splits: bool = True) -> None:
    most = tiling.max_tokens if splits else min(LOW_TOKENS, tiling.max_tokens)
    options = {"max_soft_tokens": most, "patch_size": PATCH, "pooling_kernel_size": MERGE}
    processor = Gemma4ImageProcessorPil(**options, resample=tiling.resample, do_rescale=False, do_normalize=False)
    made = processor(ImageOps.exif_transpose(Image.open(BytesIO(content))), return_tensors="np")
    places, patches = made["image_position_ids"][0], made["pixel_values"][0]
    columns, rows = places.max(axis=0) + 1
    image = patches[: rows * columns].reshape(rows, columns, PATCH, PATCH, 3).swapaxes(1, 2)
    assert (image == image.astype(np.uint8)).all()
    found = tiles_of(content, tiling, splits=splits)
    assert (found.grid, found.sizes) == (ONE_TILE, ((rows * PATCH, columns * PATCH),))
    assert found.pixels == image.astype(np.uint8).tobytes()
    assert tiling.num_tokens(found.sizes[0]) == made["num_soft_tokens_per_image"][0]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_image_of_any_size_equals_that_of_transformers(size: tuple[int, int], splits: bool) -> None:
    check(file_of(noise(*size)), splits=splits)


@pytest.mark.parametrize("name", files())
def test_image_of_any_mode_and_orientation_equals_that_of_transformers(name: str) -> None:
    check(files()[name])


@pytest.mark.parametrize("resample", [0, 1, 2, 4, 5])
def test_image_with_another_filter_equals_that_of_transformers(resample: int) -> None:
    check(file_of(noise(170, 90)), msgspec.structs.replace(TILING, resample=resample))


@example(height=4000, width=1, patch=16, merge=3, most=280)
@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    patch=st.integers(1, 32),
    merge=st.integers(1, 4),
    most=st.integers(2, 1120),
)
def test_sizes_are_those_of_transformers(height: int, width: int, patch: int, merge: int, most: int) -> None:
    wanted = get_aspect_ratio_preserving_size(height, width, patch, most * merge**2, merge)
    assert scaled((height, width), patch * merge, most) == wanted


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), most=st.integers(1, 300))
def test_engine_takes_what_the_server_cuts(height: int, width: int, most: int) -> None:
    vision = replace(VISION, most_tokens=most, num_positions=most * MERGE)
    size = scaled((height, width), vision.token_edge, vision.max_tokens)
    assert max(size) <= vision.max_edge
    assert 0 < vision.num_tokens(size) <= vision.max_tokens


def test_request_for_few_tokens_gets_few() -> None:
    content = file_of(noise(300, 200))
    few, many = (TILING.num_tokens(tiles_of(content, TILING, splits=splits).sizes[0]) for splits in (False, True))
    assert few <= LOW_TOKENS < many <= 140
    small = msgspec.structs.replace(TILING, max_tokens=20)
    assert tiles_of(content, small, splits=False) == tiles_of(content, small, splits=True)


# Parameters.


def test_parameters_of_a_published_checkpoint(tmp_path: Path) -> None:
    assert tiling_of(write(tmp_path, PROCESSOR), VISION) == TILING
    assert tiling_of(write(tmp_path, {**PROCESSOR, "resample": 2}), VISION) == msgspec.structs.replace(
        TILING, resample=2
    )


def test_parameters_without_files_follow_from_the_encoder(tmp_path: Path) -> None:
    assert tiling_of(str(tmp_path), VISION) == TILING


def test_parameters_reach_the_process_that_decodes() -> None:
    assert msgspec.msgpack.decode(encode(Decode(b"x", "", 3, TILING, True)), type=Decode).tiling == TILING


@pytest.mark.parametrize(
    ("own", "vision", "why"),
    [
        ({"do_resize": False}, {}, "do_resize is false, and images must be resized to whole tokens"),
        ({"resample": 9}, {}, "not one of Pillow's filters"),
        ({}, {"num_positions": 419}, "140 tokens .* has 420 patches on an edge, and there are 419 positions"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    tmp_path: Path, own: dict[str, Any], vision: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        tiling_of(write(tmp_path, {**PROCESSOR, **own}), replace(VISION, **vision))


# Tokens.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, backend = tmp_path_factory.mktemp("gemma4"), test_gemma3.backend()
    backend.add_special_tokens([IMAGE, BEGIN, END])
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<bos>"}))
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> text.Tokenizer:
    return text.Tokenizer.from_path(folder)


@pytest.fixture
def own(tokenizer: text.Tokenizer) -> ScaledImage:
    placeholder, begin, end = (
        tokenizer.encode(word, add_special_tokens=False, parse_special=True)[0] for word in (IMAGE, BEGIN, END)
    )
    return msgspec.structs.replace(TILING, placeholder=placeholder, begin=begin, end=end)


@pytest.mark.quick(3)
@pytest.mark.parametrize("between", ["", " ", "he", "\n", "\n\n", "\n\nhe\n"], ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prompt_equals_that_of_transformers(
    folder: Path, tokenizer: text.Tokenizer, own: ScaledImage, count: int, between: str
) -> None:
    images = [file_of(noise(20 + i, 30 * (i + 1), seed=i)) for i in range(count)]
    cut = [CutImage(Decoded(*tiles_of(image, own, splits=True)), bytes([i])) for i, image in enumerate(images)]
    content: list[dict[str, str]] = [{"type": "text", "text": between}]
    for _ in images:
        content += [{"type": "image"}, {"type": "text", "text": between}]
    messages = [{"role": "user", "content": content}]
    backend = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE)
    oracle = extracted("gemma4.processing_gemma4", "Gemma4Processor", ["replace_image_token"])
    processor: Any = SimpleNamespace(boi_token=BEGIN, eoi_token=END, image_token=IMAGE)
    counts = {"num_soft_tokens_per_image": [own.num_tokens(image.tiles.sizes[0]) for image in cut]}
    before, *behind = backend.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).split(IMAGE)
    whole = before + "".join(
        oracle.replace_image_token(processor, counts, number) + after for number, after in enumerate(behind)
    )
    found = Expansion(tokenizer, own).expand(tokenizer.encode_chat(messages), (), cut)
    assert found.token_ids == backend(whole)["input_ids"]
    for picture, expected in zip(found.pictures, counts["num_soft_tokens_per_image"], strict=True):
        ((start, length),) = picture.runs
        assert found.token_ids[start - 1 : start + length + 1] == [own.begin, *[own.placeholder] * length, own.end]
        assert length == expected


def test_placeholder_in_a_users_text_stays_text(tokenizer: text.Tokenizer, own: ScaledImage) -> None:
    Expansion(tokenizer, own)
    words = f"he {BEGIN}{IMAGE}{END} he"
    ids = tokenizer.encode_chat([{"role": "user", "content": [{"type": "text", "text": words}]}])
    assert not {own.placeholder, own.begin, own.end} & set(ids)
    assert words in tokenizer.decode(ids)
