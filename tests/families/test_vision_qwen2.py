"""vision_config of Qwen2-VL and Qwen2.5-VL: what is read, what is assumed, what is refused."""

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
from forebay.families.config.vision.qwen2 import Qwen2Config
from tests.cli.public_outer import QWEN2_5_VL_3B, QWEN2_5_VL_7B, QWEN2_VL_7B
from tests.families.test_outer import fields_of

VISION = QWEN2_5_VL_7B["vision_config"]
# Of both sizes, as published.
PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip


def read(processor: dict[str, Any] | None = None, **vision: Any) -> Qwen2Config:
    config = config_of(fields_of("qwen2_5_vl", vision_config={**VISION, **vision}), processor=processor)
    assert isinstance(config.vision, Qwen2Config)
    return config.vision


@pytest.mark.parametrize("fields", [QWEN2_5_VL_3B, QWEN2_5_VL_7B], ids=["3B", "7B"])
def test_published_models_are_read(fields: dict[str, Any]) -> None:
    config = config_of(fields, processor=PROCESSOR)
    vision = config.vision
    assert isinstance(vision, Qwen2Config)
    assert config.unknown_options == ()
    assert (config.model_type, config.rope_theta, config.rope_scaling) == ("qwen2", 1e6, None)
    assert config.rope_sections == RopeSections((16, 24, 24), interleaved=False)
    assert config.rope_sections.axes(config.head_dim // 2) == [0] * 16 + [1] * 24 + [2] * 24
    assert (vision.kind, vision.placeholder, vision.output_size) == ("qwen2_5_vl", 151_655, config.hidden_size)
    assert (vision.num_layers, vision.num_heads, vision.depth, vision.rope_theta) == (32, 16, 2, 10_000.0)
    assert (vision.hidden_size, vision.intermediate_size) == (1280, 3420)
    assert (vision.window, vision.whole) == (4, {7, 15, 23, 31})
    assert (vision.token_edge, vision.tile_size, vision.max_tokens) == (28, None, MOST_TOKENS)
    assert (vision.min_pixels, vision.max_pixels) == (3136, MOST_TOKENS * 28**2)
    assert (list(vision.mean), list(vision.std)) == (PROCESSOR["image_mean"], PROCESSOR["image_std"])
    assert [layer for layer, window in enumerate(vision.seen_tokens) if window > 16] == [7, 15, 23, 31]
    assert set(vision.seen_tokens) == {16, MOST_TOKENS}


def test_published_qwen2_vl_is_read() -> None:
    config = config_of(QWEN2_VL_7B, processor=PROCESSOR)
    vision = config.vision
    assert isinstance(vision, Qwen2Config)
    assert config.unknown_options == ()
    assert config.rope_sections == RopeSections((16, 24, 24), interleaved=False)
    assert (vision.hidden_size, vision.intermediate_size, vision.output_size) == (1280, 5120, config.hidden_size)
    assert (vision.num_layers, vision.num_heads, vision.depth, vision.token_edge) == (32, 16, 2, 28)
    assert set(vision.seen_tokens) == {vision.max_tokens} == {MOST_TOKENS}


def test_defaults_of_qwen2_vl_are_those_of_transformers() -> None:
    theirs = AutoConfig.for_model("qwen2_vl")
    fields = fields_of("qwen2_vl", vision_config={"spatial_merge_size": 2})
    text = {**fields["text_config"], "vocab_size": 1 << 18}
    ours, vision = config_of({**fields, "text_config": text, "image_token_id": None}).vision, theirs.vision_config
    assert isinstance(ours, Qwen2Config)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.embed_dim, vision.embed_dim * vision.mlp_ratio)
    assert (ours.num_layers, ours.num_heads, ours.output_size) == (vision.depth, vision.num_heads, vision.hidden_size)
    assert (ours.patch_size, ours.merge, ours.placeholder) == (
        vision.patch_size,
        vision.spatial_merge_size,
        theirs.image_token_id,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; it must be quick_gelu"),
        ({"mlp_ratio": 4.5}, "mlp_ratio is 4.5; it must be a whole number from 1 to 64"),
        ({"embed_dim": 1284}, "1284 dimensions do not divide into 16 heads"),
    ],
)
def test_encoders_of_qwen2_vl_that_are_not_served_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of({**QWEN2_VL_7B, "vision_config": {**QWEN2_VL_7B["vision_config"], **changes}})


def test_defaults_are_those_of_transformers() -> None:
    theirs, processor = AutoConfig.for_model("qwen2_5_vl"), Qwen2VLImageProcessorPil()
    fields = fields_of("qwen2_5_vl", vision_config={"spatial_merge_size": 2})
    text = {**fields["text_config"], "vocab_size": 1 << 18}
    config = config_of({**fields, "text_config": text, "image_token_id": None})
    ours, vision = config.vision, theirs.vision_config
    assert isinstance(ours, Qwen2Config)
    assert config.rope_sections == RopeSections((16, 24, 24), interleaved=False)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.depth, vision.num_heads)
    assert (ours.patch_size, ours.merge) == (vision.patch_size, vision.spatial_merge_size)
    assert (ours.depth, ours.output_size) == (vision.temporal_patch_size, vision.out_hidden_size)
    assert (ours.window * ours.token_edge, ours.whole) == (vision.window_size, set(vision.fullatt_block_indexes))
    assert (ours.placeholder, ours.rope_theta) == (theirs.image_token_id, vision.rope_parameters["rope_theta"])
    assert (ours.min_pixels, ours.max_pixels) == (processor.size["shortest_edge"], processor.size["longest_edge"])


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("flat", [False, True])
def test_sections_of_the_file_count(name: str, flat: bool) -> None:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    fields = fields_of("qwen2_5_vl", vision_config=VISION)
    text = {**fields.pop("text_config"), name: rope}
    whole = {**text, **fields} if flat else {**fields, "text_config": text}
    assert config_of(whole).rope_sections == RopeSections((2, 3, 3), interleaved=False)
    assert config_of({**whole, "vision_config": None}).rope_sections is None


@pytest.mark.parametrize(
    ("changes", "window", "whole"),
    [
        ({"window_size": 111}, 3, {7, 15, 23, 31}),
        ({"window_size": 28}, 1, {7, 15, 23, 31}),
        ({"fullatt_block_indexes": []}, 4, set()),
        ({"fullatt_block_indexes": [3, 1]}, 4, {1, 3}),
    ],
)
def test_windows_have_whole_tokens_and_layers_without_are_listed(
    changes: dict[str, Any], window: int, whole: set[int]
) -> None:
    vision = read(**changes)
    assert (vision.window, vision.whole) == (window, whole)
    assert vision.seen_tokens.count(window**2) == 32 - len(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        ({"in_channels": 1}, "in_channels is 1; it must be 3"),
        ({"num_heads": 7}, "1280 dimensions do not divide into 7 heads"),
        ({"num_heads": 640}, "heads of 2 do not divide into four parts"),
        ({"window_size": 27}, "window_size is 27; it must be at least the 28 pixels of a token's edge"),
        ({"fullatt_block_indexes": [-1]}, "fullatt_block_indexes is"),
        ({"fullatt_block_indexes": 7}, "fullatt_block_indexes is 7"),
        ({"rope_parameters": {"rope_type": "default"}}, "an object whose rope_type is axial"),
        ({"attn_logit_softcapping": 3.0}, "vision_config: attn_logit_softcapping 3.0 is not supported"),
    ],
)
def test_encoders_that_are_not_served_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


def test_processor_of_other_patches_is_refused() -> None:
    with pytest.raises(ModelError, match="patch_size is 16; the encoder has 14"):
        read(processor={"patch_size": 16})


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    for name in VISION:
        try:
            assert read(**{name: value}).max_tokens > 0
        except ModelError:
            continue
