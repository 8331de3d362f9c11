"""Settings of images in requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.media import BODY_BYTES, BODY_BYTES_WITH_IMAGES, DEFAULT_IMAGES
from forebay.config.resolve import HERE, resolve, resolve_server
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.siglip import SiglipConfig
from forebay.formats.weight_shapes import WeightShapes

VISION = SiglipConfig(
    kind="smolvlm",
    placeholder=5,
    image_size=512,
    patch_size=16,
    merge=4,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    norm_eps=1e-6,
)


def with_vision(path: Path, draft_head: bool, mmproj: Path | None) -> tuple[ModelConfig, WeightShapes]:
    config, weights = HERE.model(path, draft_head, mmproj)
    return replace(config, vision=VISION), weights


def test_body_limit_rises_if_the_model_accepts_images() -> None:
    seeing = replace(HERE, model=with_vision)
    assert resolve().server.max_body_bytes == BODY_BYTES
    assert resolve(survey=seeing).server.max_body_bytes == BODY_BYTES_WITH_IMAGES
    assert resolve({"max_body_bytes": "1MiB"}, survey=seeing).server.max_body_bytes == 1 << 20


def test_body_limit_of_a_router_admits_images_of_its_members() -> None:
    warnings: list[str] = []
    for flags, limit in (({}, BODY_BYTES_WITH_IMAGES), ({"max_body_bytes": "1MiB"}, 1 << 20)):
        assert resolve_server(flags, {}, None, warnings.append).max_body_bytes == limit
    assert not warnings


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        ("image=3", 3),
        (" image=0 , video=2", 0),
        ('{"image": 5, "video": 1}', 5),
        ("video=1", DEFAULT_IMAGES),
        (7, 7),
    ],
)
def test_limit_of_images_is_read_as_others_write_it(written: Any, limit: int) -> None:
    assert resolve({"limit_mm_per_prompt": written}).server.limit_mm_per_prompt == limit


@pytest.mark.parametrize(
    "written", ["image", "image=x", "image=-1", "image=1000", '{"image": {}}', "{", '{"image"', "[]"]
)
def test_limit_of_images_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"limit.mm.per.prompt"):
        resolve({"limit_mm_per_prompt": written})
