"""Images of Gemma 3: one square whatever the shape, and tokens that depend on the text around an image."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from forebay.base.errors import ModelError
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from forebay.server.images.cutting import tiles_of
from forebay.server.images.decoding import CutImage
from forebay.server.images.expansion import Expansion
from forebay.server.images.frames import Decoded
from forebay.server.images.tiling import tiling_of
from forebay.server.images.tilings.gemma3 import WholeSquare
from forebay.text import tokenizer as text
from tests.server.images.smolvlm import file_of, noise
from tests.server.images.test_pixels import SIZES, files

EDGE, TOKENS = 56, 4
ADDED = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def backend() -> Tokenizer:
    """Every byte, and up to four line breaks as one token, as in Gemma's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("h", "e")]
    vocab = {piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ADDED])
    return made


PLACEHOLDER, BEGIN, END = (
    backend().token_to_id(f"<{name}>") for name in ("image_soft_token", "start_of_image", "end_of_image")
)
VISION = PooledSiglipConfig(
    kind="gemma3",
    placeholder=PLACEHOLDER,
    begin=BEGIN,
    end=END,
    image_size=EDGE,
    patch_size=7,
    merge=4,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
)
# As Gemma 3 publishes them.
PREPROCESSOR: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": EDGE, "width": EDGE},
}
TILING = WholeSquare(placeholder=PLACEHOLDER, token_edge=28, edge=EDGE, begin=BEGIN, end=END)


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    (folder / "tokenizer.json").write_text(backend().to_str())
    write(folder, "tokenizer_config.json", {"chat_template": TEMPLATE, "bos_token": "<bos>"})
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> text.Tokenizer:
    return text.Tokenizer.from_path(folder)


def processor_of(folder: Path, **options: Any) -> Gemma3Processor:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    own = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=named)
    images = Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE}, **options)
    return Gemma3Processor(images, own, chat_template=TEMPLATE, image_seq_length=TOKENS)


# Pixels.


def check(content: bytes) -> None:
    made = Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE}, do_rescale=False, do_normalize=False)
    (tile,) = made(ImageOps.exif_transpose(Image.open(BytesIO(content))))["pixel_values"]
    for splits in (True, False):
        found = tiles_of(content, TILING, splits=splits)
        assert tile.dtype == np.uint8
        assert (found.grid, found.sizes) == ((0, 0), ((EDGE, EDGE),))
        assert found.pixels == np.moveaxis(tile, 0, -1).tobytes()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_square_of_any_size_equals_that_of_transformers(size: tuple[int, int]) -> None:
    check(file_of(noise(*size)))


@pytest.mark.parametrize("name", files())
def test_square_of_any_mode_and_orientation_equals_that_of_transformers(name: str) -> None:
    check(files()[name])


# Parameters.


def test_square_of_a_published_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "processor_config.json", {"image_seq_length": TOKENS, "processor_class": "Gemma3Processor"})
    assert tiling_of(write(tmp_path, "preprocessor_config.json", PREPROCESSOR), VISION) == TILING


def test_square_without_files_follows_from_the_encoder(tmp_path: Path) -> None:
    assert tiling_of(str(tmp_path), VISION) == TILING


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan is true, and images in several crops are not served"),
        ({"do_resize": False}, "do_resize is false, and the encoder takes tiles of 56 pixels alone"),
        ({"size": {"height": 896, "width": 896}}, "size is .*; the encoder takes a height and a width of 56 pixels"),
        ({"size": {"shortest_edge": 56}}, "the encoder takes a height and a width of 56 pixels"),
        ({"resample": 9}, "not one of Pillow's filters"),
    ],
)
def test_parameters_that_do_not_fit_the_encoder_are_refused(tmp_path: Path, own: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        tiling_of(write(tmp_path, "preprocessor_config.json", {**PREPROCESSOR, **own}), VISION)


def test_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image_seq_length is 256; the encoder makes 4 of an image"):
        tiling_of(write(tmp_path, "processor_config.json", {"image_seq_length": 256}), VISION)


# Tokens.


@pytest.mark.quick(3)
@pytest.mark.parametrize("between", ["", " ", "he", "\n", "\n\n", "\n\nhe\n"], ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prompt_equals_that_of_transformers(folder: Path, tokenizer: text.Tokenizer, count: int, between: str) -> None:
    """Line breaks beside an image are one token with those around it."""
    images = [file_of(noise(20 + i, 30, seed=i)) for i in range(count)]
    content: list[dict[str, str]] = [{"type": "text", "text": between}]
    for _ in images:
        content += [{"type": "image"}, {"type": "text", "text": between}]
    messages = [{"role": "user", "content": content}]
    processor = processor_of(folder)
    whole = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    opened = [Image.open(BytesIO(image)) for image in images]
    made = processor(text=whole, images=opened or None)
    cut = [CutImage(Decoded(*tiles_of(image, TILING, splits=True)), bytes([i])) for i, image in enumerate(images)]
    found = Expansion(tokenizer, TILING).expand(tokenizer.encode_chat(messages), (), cut)
    assert found.token_ids == made["input_ids"][0]
    types = [0] * len(found.token_ids)
    for picture in found.pictures:
        ((start, length),) = picture.runs
        assert length == TOKENS
        types[start : start + length] = [1] * length
    assert types == made["token_type_ids"][0]


def test_begin_of_an_image_in_a_users_text_stays_text(tokenizer: text.Tokenizer) -> None:
    Expansion(tokenizer, TILING)
    words = "he <start_of_image><image_soft_token> he"
    ids = tokenizer.encode_chat([{"role": "user", "content": [{"type": "text", "text": words}]}])
    assert not {BEGIN, END, PLACEHOLDER} & set(ids)
    assert words in tokenizer.decode(ids)


def test_tokenizer_without_the_begin_of_an_image_is_refused(folder: Path, tmp_path: Path) -> None:
    layout = json.loads((folder / "tokenizer.json").read_text())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] != "<start_of_image>"
    write(tmp_path, "tokenizer.json", layout)
    with pytest.raises(ModelError, match="the token with which templates write an image"):
        Expansion(text.Tokenizer.from_path(tmp_path), TILING)
