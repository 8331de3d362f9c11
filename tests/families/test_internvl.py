"""config.json of InternVL: what is read of its encoder, what is assumed, what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of
from forebay.families.config.vision.internvl import InternVitConfig
from forebay.families.config.vision.pixtral import MEAN, STD
from tests.families.given import HOSTILE
from tests.families.test_outer import fields_of

VISION = {"num_attention_heads": 4, "hidden_size": 32, "image_size": 56}


def read(*, outer: dict[str, Any] | None = None, processor: dict[str, Any] | None = None, **vision: Any) -> Any:
    fields = fields_of("internvl", **(outer or {}), vision_config={**VISION, **vision})
    return config_of(fields, processor=processor).vision


def test_silence_of_internvl_means_what_it_means_to_transformers() -> None:
    theirs = AutoConfig.for_model("internvl", vision_config={}, text_config={"model_type": "qwen2"})
    vision, ours = theirs.vision_config, config_of(fields_of("internvl", vision_config={})).vision
    assert isinstance(ours, InternVitConfig)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert ([ours.image_size] * 2, [ours.patch_size] * 2) == (list(vision.image_size), list(vision.patch_size))
    assert (ours.bias, ours.head_norm, ours.rms_norm) == (vision.attention_bias, vision.use_qk_norm, False)
    assert (ours.norm_eps, ours.last_norm) == (vision.layer_norm_eps, not vision.use_mean_pooling)
    assert ours.max_tokens == theirs.image_seq_length == 256
    assert (ours.rescale, ours.mean, ours.std) == (1 / 255, MEAN, STD)


def test_both_edges_of_internvl_may_be_given() -> None:
    assert read(image_size=[56, 56], patch_size=[14, 14]) == read(image_size=56, patch_size=14)


@pytest.mark.parametrize(
    ("vision", "outer", "named"),
    [
        ({"image_size": [56, 28]}, {}, "image_size"),
        ({"image_size": [56]}, {}, "image_size"),
        ({"patch_size": ["x", "x"]}, {}, "patch_size"),
        ({"image_size": 70}, {}, "a tile of 70 pixels has 5 patches of 14 in a row"),
        ({"image_size": 7}, {}, "a tile of 7 pixels has 0 patches"),
        ({"norm_type": "x"}, {}, "norm_type"),
        ({"hidden_act": "gelu_pytorch_tanh"}, {}, "hidden_act"),
        ({"num_channels": 1}, {}, "num_channels"),
        ({"use_mask_token": True}, {}, "use_mask_token"),
        ({"use_absolute_position_embeddings": False}, {}, "use_absolute_position_embeddings"),
        ({"num_attention_heads": 5}, {}, "32 dimensions do not divide into 5 heads"),
        ({}, {"downsample_ratio": 0.4}, "downsample_ratio"),
        ({}, {"downsample_ratio": 0}, "downsample_ratio"),
        ({}, {"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({}, {"vision_feature_layer": -2}, "vision_feature_layer"),
        ({}, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({}, {"image_token_id": 1 << 20}, "image_token_id"),
    ],
)
def test_a_wrong_field_of_internvl_is_named(vision: dict[str, Any], outer: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(outer=outer, **vision)


@pytest.mark.parametrize("name", ["image_size", "patch_size", "norm_type", "attention_bias", "use_qk_norm"])
def test_hostile_values_of_internvl_are_read_or_named(name: str) -> None:
    for value in HOSTILE:
        with suppress(ModelError):
            assert read(**{name: value}).max_tokens > 0


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_ratios_of_internvl_are_read_or_named(value: Any) -> None:
    with suppress(ModelError):
        assert read(outer={"downsample_ratio": value}).merge in (1, 2)
