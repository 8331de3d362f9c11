"""vision_config of Mistral 3: what is read, what is assumed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.config.vision.pixtral import MEAN, STD, PixtralConfig
from tests.families.test_outer import fields_of

# As Mistral-Small-3.1 publishes them.
VISION = {
    "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
    "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
    "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
}  # fmt: skip


def config(processor: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    return config_of(fields_of("mistral3", **more), processor=processor)


def read(processor: dict[str, Any] | None = None, **more: Any) -> PixtralConfig:
    vision = config(processor, **more).vision
    assert isinstance(vision, PixtralConfig)
    return vision


def of_vision(**changes: Any) -> PixtralConfig:
    return read(vision_config={**VISION, **changes})


def test_published_encoder_is_read() -> None:
    found = config(vision_config=VISION, image_token_id=None, image_token_index=4)
    assert found.unknown_options == ()
    vision = found.vision
    assert isinstance(vision, PixtralConfig)
    assert (vision.placeholder, vision.token_edge, vision.max_edge) == (4, 28, 1540)
    assert (vision.max_tokens, vision.tile_size, vision.gelu) == (55 * 55, None, False)
    assert (vision.mean, vision.std) == (MEAN, STD)
    assert vision.tiles == "tiles of up to 3,025 tokens, one for each 28 x 28 pixels"


def test_defaults_are_those_of_transformers() -> None:
    theirs = AutoConfig.for_model("pixtral")
    ours = read(vision_config={"num_attention_heads": 16}, image_token_id=None)
    assert (ours.image_size, ours.patch_size) == (theirs.image_size, theirs.patch_size)
    assert (ours.hidden_size, ours.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (ours.gelu, ours.theta) == (theirs.hidden_act == "gelu", theirs.rope_parameters["rope_theta"])
    outer = AutoConfig.for_model("mistral3")
    assert (ours.placeholder, ours.merge) == (outer.image_token_index, outer.spatial_merge_size)
    assert ours.projector_bias == outer.multimodal_projector_bias


def test_rope_is_read_as_both_releases_write_it() -> None:
    assert of_vision(rope_theta=500.0).theta == 500.0
    assert of_vision(rope_parameters={"rope_type": "axial", "rope_theta": 300.0}).theta == 300.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be gelu or silu"),
        ({"model_type": "clip_vision_model"}, "model_type is 'clip_vision_model'; it must be pixtral"),
        ({"num_attention_heads": 5}, "1024 dimensions do not divide into 5 heads"),
        ({"num_attention_heads": 512}, "heads have 2 dimensions, which do not divide into pairs"),
        ({"head_dim": 32}, "head_dim is 32; it must be 64"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; it must be axial or default"),
        ({"patch_size": [14, 14]}, "patch_size is"),
        ({"image_size": 1 << 20}, "image_size is 1048576"),
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
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2; it must be -1"),
        ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer is"),
        ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
    ],
)
def test_wrong_values_around_the_encoder_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**more)


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    for name in (*VISION, "rope_parameters"):
        try:
            assert of_vision(**{name: value}).max_tokens > 0
        except ModelError:
            continue
