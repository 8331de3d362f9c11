"""Parameters of images, from the files of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.server.images.expansion import Expansion
from forebay.server.images.tiling import tiling_at, tiling_of
from forebay.server.images.tilings.idefics import MAX_EDGE, SquareTiles
from forebay.text.tokenizer import Tokenizer
from tests.server.images.smolvlm import TILING, VISION, write_tokenizer

OF_256M = replace(VISION, image_size=512, patch_size=16, merge=4, placeholder=49190)
# As SmolVLM-256M publishes them.
PREPROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 512},
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 2048},
}
WANTED = SquareTiles(placeholder=49190, token_edge=64, tile_size=512, longest_edge=2048)


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder)


def test_tiling_of_a_published_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "processor_config.json", {"image_seq_len": 64, "processor_class": "Idefics3Processor"})
    assert tiling_of(write(tmp_path, "preprocessor_config.json", PREPROCESSOR), OF_256M) == WANTED


def test_tiling_of_a_checkpoint_saved_by_transformers(tmp_path: Path) -> None:
    path = write(tmp_path, "processor_config.json", {"image_processor": PREPROCESSOR, "image_seq_len": 64})
    assert tiling_of(path, OF_256M) == WANTED


def test_tiling_without_files_follows_from_the_encoder(tmp_path: Path) -> None:
    assert tiling_of(str(tmp_path), OF_256M) == WANTED


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"do_image_splitting": False}, {"splits": False}),
        ({"resample": 3}, {"resample": 3}),
        ({"size": {"longest_edge": 1536}}, {"longest_edge": 1536}),
        ({"size": {"height": 384, "width": 512}}, {"size": (512, 384)}),
    ],
)
def test_tiling_other_parameters_are_read(tmp_path: Path, own: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = tiling_of(write(tmp_path, "preprocessor_config.json", {**PREPROCESSOR, **own}), OF_256M)
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"max_image_size": {"longest_edge": 364}}, "tiles have 364 pixels, and the encoder takes 512"),
        ({"max_image_size": 512}, "not an object with longest_edge"),
        ({"size": {"longest_edge": "2048"}}, "not an object with longest_edge"),
        ({"size": {"longest_edge": 0}}, "not an object with longest_edge"),
        ({"size": {"height": MAX_EDGE + 1, "width": 5}}, "must have 1 to 4096 pixels"),
        ({"resample": 9}, "not one of Pillow's filters"),
        ({"do_resize": False}, "do_resize is false"),
    ],
)
def test_tiling_that_does_not_fit_is_refused(tmp_path: Path, own: dict[str, Any], why: str) -> None:
    path = write(tmp_path, "preprocessor_config.json", {**PREPROCESSOR, **own})
    with pytest.raises(ModelError, match=why):
        tiling_of(path, OF_256M)


def test_tiling_of_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image_seq_len is 169; the encoder makes 64"):
        tiling_of(write(tmp_path, "processor_config.json", {"image_seq_len": 169}), OF_256M)


def test_tiling_of_a_model_without_an_encoder_is_none(embedded_model: Path) -> None:
    assert tiling_at(str(embedded_model)) is None


def test_expansion_of_another_model_s_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_tokenizer(tmp_path))
    wrong = SquareTiles(placeholder=5, token_edge=16, tile_size=TILING.tile_size, longest_edge=128)
    with pytest.raises(ModelError, match=r"does not read '.' as the placeholder of images, the token 5"):
        Expansion(tokenizer, wrong)  # a letter, which users write
