"""vision_config of Qwen3-VL, and its image processor: what is read, what is assumed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from forebay.base.errors import ModelError
from forebay.families.base.rope import RopeSections
from forebay.families.config.model_config import config_of
from forebay.families.config.vision.qwen import MOST_TOKENS
from forebay.families.config.vision.qwen3 import Qwen3Config
from tests.families.test_outer import fields_of

VL = ["qwen3_vl", "qwen3_vl_moe"]
KINDS = ["qwen3_5", "qwen3_5_moe", "qwen4_exp", *VL]
# Qwen/Qwen3-VL-2B-Instruct, as published.
VISION = {
    "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_vl",
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
PROCESSOR = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip


def read(kind: str = "qwen3_vl", processor: dict[str, Any] | None = None, **vision: Any) -> Qwen3Config:
    config = config_of(fields_of(kind, vision_config={**VISION, **vision}), processor=processor)
    assert isinstance(config.vision, Qwen3Config)
    return config.vision


@pytest.mark.parametrize("kind", VL)
def test_published_encoder_and_processor_are_read(kind: str) -> None:
    config = config_of(fields_of(kind, vision_config=VISION), processor=PROCESSOR)
    vision = config.vision
    assert isinstance(vision, Qwen3Config)
    assert config.unknown_options == ()
    assert (vision.num_layers, vision.num_heads, vision.side, vision.depth) == (24, 16, 48, 2)
    assert (vision.deepstack, vision.output_size, vision.rope_theta) == ((5, 11, 17), 2048, 10_000.0)
    assert (vision.token_edge, vision.max_tokens, vision.tile_size) == (32, MOST_TOKENS, None)
    assert (vision.mean, vision.std, vision.rescale) == ((0.5,) * 3, (0.5,) * 3, 1 / 255)
    assert config.rope_sections == RopeSections((24, 20, 20), interleaved=True)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    theirs, processor = AutoConfig.for_model(kind), Qwen2VLImageProcessorPil()
    fields = fields_of(kind, vision_config={"spatial_merge_size": 2})
    text = {**fields["text_config"], "vocab_size": 1 << 18}
    ours = config_of({**fields, "text_config": text, "image_token_id": None}).vision
    assert isinstance(ours, Qwen3Config)
    vision = theirs.vision_config
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.depth, vision.num_heads)
    assert (ours.patch_size, ours.merge, ours.depth) == (16, vision.spatial_merge_size, vision.temporal_patch_size)
    assert (ours.output_size, ours.side**2) == (vision.out_hidden_size, vision.num_position_embeddings)
    deepstack = tuple(getattr(vision, "deepstack_visual_indexes", ()))
    assert (ours.deepstack, ours.placeholder) == (deepstack, theirs.image_token_id)
    assert (ours.min_pixels, ours.max_pixels) == (processor.size["shortest_edge"], processor.size["longest_edge"])
    assert (list(ours.mean), list(ours.std)) == (list(processor.image_mean), list(processor.image_std))


def test_sections_of_the_file_count() -> None:
    fields = fields_of("qwen3_vl", vision_config=VISION)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    fields["text_config"] = {**fields["text_config"], "rope_parameters": rope}
    assert config_of(fields).rope_sections == RopeSections((2, 3, 3), interleaved=True)
    assert config_of({**fields, "vision_config": None}).rope_sections is None
    rope["mrope_section"] = [2, 3]
    with pytest.raises(ModelError, match=r"mrope_section is '\[2, 3\]'; it must be a list of three whole numbers"):
        config_of(fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be gelu_pytorch_tanh"),
        ({"in_channels": 1}, "in_channels is 1; it must be 3"),
        ({"num_heads": 5}, "1024 dimensions do not divide into 5 heads"),
        ({"num_heads": 512}, "heads of 2 do not divide into four parts"),
        ({"num_position_embeddings": 2300}, "num_position_embeddings is 2300; it must be a square number"),
        ({"deepstack_visual_indexes": [3, 24]}, "a list of layers, 0 to 23"),
        ({"deepstack_visual_indexes": [5, 3]}, "a list of ascending layers"),
        ({"deepstack_visual_indexes": 3}, "a list of layers"),
        ({"rope_parameters": {"rope_type": "default"}}, "an object whose rope_type is axial"),
        ({"rope_parameters": {"rope_theta": -1}}, "a rope_theta above 0"),
    ],
)
def test_encoders_that_are_not_served_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"size": 3}, "an object with shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "images have 9 to 8 pixels"),
        ({"min_pixels": 2.5}, "images have 2.5 to 1003520 pixels"),
        ({"max_pixels": 1 << 40}, "it must be a range from 1 to 268435456"),
        ({"min_pixels": 1, "max_pixels": 1000}, "images of at most 1000 pixels have no token of 32"),
        ({"patch_size": 14}, "patch_size is 14; the encoder has 16"),
        ({"merge_size": 4}, "merge_size is 4; the encoder has 2"),
    ],
)
def test_processors_that_do_not_fit_are_refused(processor: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(processor=processor)
    assert "\n" not in str(caught.value)


def test_older_names_of_the_range_of_pixels_count() -> None:
    vision = read(processor={"min_pixels": 3136, "max_pixels": 602_112})
    assert (vision.min_pixels, vision.max_pixels) == (3136, 602_112)


def test_an_image_has_no_more_tokens_than_others_can_wait_for() -> None:
    vision = read(processor={"min_pixels": 3136, "max_pixels": 12_845_056})
    assert vision.max_pixels == MOST_TOKENS * vision.token_edge**2 == 4_194_304


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    for name in VISION:
        try:
            assert read(**{name: value}).max_tokens > 0
        except ModelError:
            continue
    for name in ("size", "min_pixels", "max_pixels", "patch_size", "merge_size", "image_mean", "image_std"):
        try:
            assert read(processor={name: value}).max_tokens > 0
        except ModelError:
            continue
