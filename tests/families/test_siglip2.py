"""vision_config of LFM2-VL: what is read, what is assumed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.config.vision.siglip2 import Siglip2Config
from tests.families.test_outer import fields_of

# As LFM2-VL-450M publishes them.
VISION = {
    "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 3072,
    "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model", "num_attention_heads": 12, "num_channels": 3,
    "num_hidden_layers": 12, "num_patches": 256, "patch_size": 16, "vision_use_head": False,
}  # fmt: skip


def config(processor: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    return config_of(fields_of("lfm2_vl", **more), processor=processor)


def read(processor: dict[str, Any] | None = None, **more: Any) -> Siglip2Config:
    vision = config(processor, **more).vision
    assert isinstance(vision, Siglip2Config)
    return vision


def of_vision(**changes: Any) -> Siglip2Config:
    return read(vision_config={**VISION, **changes})


def test_published_encoder_is_read() -> None:
    found = config(vision_config=VISION, image_token_id=None, image_token_index=4)
    assert found.unknown_options == ()
    vision = found.vision
    assert isinstance(vision, Siglip2Config)
    assert (vision.placeholder, vision.token_edge, vision.position_side) == (4, 32, 16)
    assert (vision.max_tokens, vision.max_patches, vision.tile_size) == (256, 1024, None)
    assert vision.tiles == "tiles of up to 256 tokens, one for each 32 x 32 pixels"


def test_defaults_are_those_of_transformers() -> None:
    theirs, ours = AutoConfig.for_model("lfm2_vl"), read(vision_config={"num_attention_heads": 12})
    vision = theirs.vision_config
    assert (ours.patch_size, ours.position_side**2) == (vision.patch_size, vision.num_patches)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert (ours.norm_eps, ours.merge) == (vision.layer_norm_eps, theirs.downsample_factor)
    assert (ours.projector_size, ours.projector_norm) == (theirs.projector_hidden_size, theirs.projector_use_layernorm)
    assert ours.projector_bias == theirs.projector_bias


@pytest.mark.parametrize(
    ("processor", "most"),
    [({}, 256), ({"max_image_tokens": 300}, 300), ({"tile_size": 64}, 256), ({"tile_size": 1024}, 1024)],
)
def test_largest_tile_is_one_of_a_grid_or_an_image_that_is_not_split(processor: dict[str, Any], most: int) -> None:
    assert read(processor).max_tokens == most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be gelu_pytorch_tanh"),
        ({"model_type": "siglip_vision_model"}, "model_type is 'siglip_vision_model'; it must be siglip2_vision_model"),
        ({"num_attention_heads": 5}, "768 dimensions do not divide into 5 heads"),
        ({"num_patches": 200}, "num_patches is 200, which is no square"),
        ({"patch_size": [16, 16]}, "patch_size is"),
    ],
)
def test_encoders_that_are_not_served_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        of_vision(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image_token_id": 64}, "image_token_id is 64; it must be a whole number from 0 to 63"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'; it must be gelu"),
        ({"downsample_factor": 0}, "downsample_factor is 0"),
    ],
)
def test_wrong_values_around_the_encoder_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**more)


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    for name in VISION:
        try:
            assert of_vision(**{name: value}).max_tokens > 0
        except ModelError:
            continue
    for name in ("max_image_tokens", "tile_size", "image_mean", "image_std"):
        try:
            assert read(processor={name: value}).max_tokens > 0
        except ModelError:
            continue
