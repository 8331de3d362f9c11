"""vision_config of Gemma 4, and its image processor: what is read, what is assumed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from forebay.base.errors import ModelError
from forebay.config import estimates
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.config.vision.gemma4 import Gemma4VisionConfig
from forebay.layers import grid_encoder
from forebay.models.encoder import encoder_params
from tests.families.test_outer import fields_of

# google/gemma-4-E4B-it, as published.
SMALL = {
    "_name_or_path": "", "architectures": None, "attention_bias": False, "attention_dropout": 0.0,
    "chunk_size_feed_forward": 0, "default_output_length": 280, "dtype": "bfloat16", "global_head_dim": 64,
    "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "is_encoder_decoder": False, "max_position_embeddings": 131_072,
    "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16, "num_key_value_heads": 12,
    "output_attentions": False, "output_hidden_states": False, "patch_size": 16, "pooling_kernel_size": 3,
    "position_embedding_size": 10_240, "problem_type": None, "return_dict": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False, "use_clipped_linears": True,
}  # fmt: skip
# google/gemma-4-26B-A4B-it differs so.
LARGE = {
    **SMALL, "global_head_dim": 72, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "standardize": True,
    "use_clipped_linears": False,
}  # fmt: skip
PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0], "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280,
    "image_std": [1.0, 1.0, 1.0], "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip
HALF = ((0.5,) * 3, (0.5,) * 3)


def config(
    vision: dict[str, Any], *, processor: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **more: Any
) -> ModelConfig:
    fields = fields_of("gemma4", vision_config=vision, **more)
    return config_of({**fields, "text_config": {**fields["text_config"], **(text or {})}}, processor=processor)


def read(processor: dict[str, Any] | None = None, **vision: Any) -> Gemma4VisionConfig:
    found = config({**SMALL, **vision}, processor=processor).vision
    assert isinstance(found, Gemma4VisionConfig)
    return found


@pytest.mark.parametrize("bidirectional", [None, "vision"])
def test_published_encoders_are_read(bidirectional: str | None) -> None:
    vision = SMALL if bidirectional is None else LARGE
    found = config(vision, processor=PROCESSOR, text={"use_bidirectional_attention": bidirectional})
    own = found.vision
    assert isinstance(own, Gemma4VisionConfig)
    assert found.unknown_options == ()
    assert (own.num_layers, own.num_heads, own.head_dim) == ((16, 12, 64) if vision is SMALL else (27, 16, 72))
    assert (own.clipped, own.standardized) == (vision is SMALL, vision is LARGE)
    assert (own.theta, own.num_positions, own.merge) == (100.0, 10_240, 3)
    assert (own.token_edge, own.max_tokens, own.tile_size) == (48, 280, None)
    assert own.max_edge == 280 * 48
    assert own.longest_span == (280 if bidirectional else 0)
    assert (own.rescale, own.mean, own.std) == (1 / 255, *HALF)


def test_defaults_are_those_of_transformers() -> None:
    theirs, processor = AutoConfig.for_model("gemma4", vision_config={}, text_config={}), Gemma4ImageProcessorPil()
    silent = dict.fromkeys(("image_token_id", "boi_token_id", "eoi_token_id"))
    found = config({}, text={"vocab_size": 1 << 18, "vocab_size_per_layer_input": 1 << 18}, **silent)
    ours, vision = found.vision, theirs.vision_config
    assert isinstance(ours, Gemma4VisionConfig)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert (ours.num_kv_heads, ours.head_dim) == (vision.num_key_value_heads, vision.head_dim)
    assert (ours.patch_size, ours.merge) == (vision.patch_size, vision.pooling_kernel_size)
    assert (ours.patch_size, ours.merge) == (processor.patch_size, processor.pooling_kernel_size)
    assert (ours.norm_eps, ours.num_positions) == (vision.rms_norm_eps, vision.position_embedding_size)
    assert (ours.clipped, ours.standardized) == (vision.use_clipped_linears, vision.standardize)
    assert ours.theta == vision.rope_parameters["rope_theta"]
    assert ours.max_tokens == processor.max_soft_tokens
    assert (ours.placeholder, ours.begin) == (theirs.image_token_id, theirs.boi_token_id)
    assert (ours.end, ours.input_id) == (theirs.eoi_token_id, theirs.text_config.pad_token_id)
    assert ours.bidirectional == (theirs.text_config.use_bidirectional_attention is not None)
    assert (ours.rescale, ours.mean, ours.std) == (processor.rescale_factor, *HALF)


def test_language_model_is_given_its_padding_for_an_image() -> None:
    found = config(SMALL, text={"pad_token_id": 9}).vision
    assert found is not None
    assert (found.placeholder, found.input_id) == (3, 9)


def test_pixels_are_normalized_where_the_processor_says_so() -> None:
    """And then by the encoder itself: 2 (x - 0.5)."""
    numbers = {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.4}
    assert (read(numbers).mean, read(numbers).std) == HALF
    found = read({**numbers, "do_normalize": True})
    for pixel in (0.0, 0.6, 1.0):
        for mean, own_mean, own_std in zip((0.1, 0.2, 0.3), found.mean, found.std, strict=True):
            assert (pixel - own_mean) / own_std == pytest.approx(2 * ((pixel - mean) / 0.4 - 0.5))


def test_costs_count_the_products_of_a_layer_and_of_what_is_around() -> None:
    found = read(num_key_value_heads=4, num_attention_heads=12)
    attention = 768 * 64 * (2 * 12 + 2 * 4)
    assert found.layer_products == (attention + 3 * 768 * 3072, 2 * 12 * 64)
    assert found.outer_products(100) == pytest.approx(768 * (3 * 16 * 16 + 100 / 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; it must be gelu_pytorch_tanh"),
        ({"head_dim": 66}, "head_dim is 66; it must be a multiple of 4"),
        ({"num_key_value_heads": 5}, "12 heads do not divide among 5 of keys and values"),
        ({"position_embedding_size": 2}, "position_embedding_size is 2; it must be at least 3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; it must be axial or default"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "rope_theta is 1e-300; it must be a number of at least 1"),
        ({"head_dim": 1 << 24}, "head_dim is 16777216; it must be a whole number from 1 to 1024"),
        ({"patch_size": 4096}, "280 tokens of 12288 x 12288 pixels are too large: at most 67108864 bytes of an image"),
        ({"patch_size": 128}, "280 tokens of 384 x 384 pixels are too large"),
        ({"use_clipped_linears": 1}, "use_clipped_linears is 1; it must be true or false"),
    ],
)
def test_encoders_that_are_not_served_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"max_soft_tokens": 0}, "max_soft_tokens is 0; it must be a whole number from 1 to 4096"),
        ({"max_soft_tokens": 5000}, "max_soft_tokens is 5000"),
        ({"patch_size": 14}, "patch_size is 14; it must be 16, as the encoder has it"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2; it must be 3, as the encoder has it"),
    ],
)
def test_processors_that_do_not_fit_are_refused(processor: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(processor)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["image_token_id", "boi_token_id", "eoi_token_id"])
def test_tokens_outside_of_the_vocabulary_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is 64; it must be a whole number from 0 to 63"):
        config(SMALL, **{name: 64})


def test_marks_of_an_image_that_are_its_placeholder_are_refused() -> None:
    with pytest.raises(ModelError, match="image_token_id, boi_token_id and eoi_token_id must be three different ids"):
        config(SMALL, boi_token_id=3)


def test_activation_of_wide_heads_is_counted() -> None:
    narrow, wide = (estimates._of_tile(read(num_attention_heads=count)) for count in (12, 24))
    assert wide - narrow == 4 * 280 * 9 * 12 * 64


@pytest.mark.parametrize(("bidirectional", "most"), [(None, 64), ("vision", 280)])
def test_step_has_room_for_an_image_that_no_chunk_may_cut(bidirectional: str | None, most: int) -> None:
    found = config(SMALL, text={"use_bidirectional_attention": bidirectional})
    assert estimates.most_prompt_tokens(64, found) == most
    assert estimates.most_prompt_tokens(512, found) == 512


def test_parameters_of_an_encoder_are_listed_without_its_rotary_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_encoder, "cos_sin_table", None)
    assert encoder_params(config(SMALL))


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    for name in SMALL:
        try:
            found = read(**{name: value})
        except ModelError:
            continue
        assert found.max_tokens > 0
        assert found.max_edge > 0
    for name in PROCESSOR:
        try:
            found = read({name: value})
        except ModelError:
            continue
        assert found.max_tokens > 0
        assert all(map(math.isfinite, (found.rescale, *found.mean, *found.std)))
