"""vision_config of SmolVLM and Idefics 3: what is read, what is assumed, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig, SiglipVisionConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.config.outer import OUTERS
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from forebay.families.config.vision.siglip import SiglipConfig
from tests.cli.public_configs import LLAMA_3_8B, SMOLLM2_135M
from tests.families.test_outer import fields_of
from tests.families.test_vision_qwen import KINDS as OF_QWEN

KINDS = ["smolvlm", "idefics3"]
_TILES = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "use_base_siglip": False}
# As published: how the configurations describe the encoder, what is around that, and what both come to.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        {"model_type": "idefics3", "image_token_id": 49190, "scale_factor": 4, "text_config": SMOLLM2_135M},
        {
            **_TILES, "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
            "model_type": "idefics3", "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048},
        },
        {"num_layers": 12, "intermediate_size": 3072, "max_patches": 1024, "max_tokens": 64},
    ),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": (
        {"model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 3, "text_config": SMOLLM2_135M},
        {
            **_TILES, "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "max_image_size": {"longest_edge": 384}, "model_type": "smolvlm_vision", "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "size": {"longest_edge": 1920},
        },
        {"num_layers": 27, "side": 27, "max_tokens": 81},  # six pixels fill no patch
    ),
    "HuggingFaceM4/Idefics3-8B-Llama3": (
        {"model_type": "idefics3", "image_token_id": 128257, "scale_factor": 2, "text_config": LLAMA_3_8B},
        {
            "attention_dropout": 0.0, "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304,
            "model_type": "idefics3", "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
        {"num_layers": 27, "max_patches": 676, "max_tokens": 169, "placeholder": 128257},
    ),
}  # fmt: skip


def read(kind: str = "smolvlm", processor: dict[str, Any] | None = None, **more: Any) -> SiglipConfig:
    config = config_of(fields_of(kind, **more), processor=processor)
    assert isinstance(config.vision, SiglipConfig)
    return config.vision


def of_vision(**changes: Any) -> ModelConfig:
    fields = fields_of("smolvlm")
    return config_of({**fields, "vision_config": {**fields["vision_config"], **changes}})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_encoders_are_read(name: str) -> None:
    outer, vision, expected = PUBLISHED[name]
    text = {**outer["text_config"], "vocab_size": outer["image_token_id"] + 2}
    config = config_of({**outer, "text_config": text, "vision_config": vision})
    assert config.vision is not None
    assert config.vision.kind == outer["model_type"]
    assert config.unknown_options == ()
    assert {field: getattr(config.vision, field) for field in expected} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    theirs, fields = AutoConfig.for_model(kind), fields_of(kind, scale_factor=1)
    ours = read(kind, **{**fields, "vision_config": {}})
    vision = theirs.vision_config
    assert (ours.image_size, ours.patch_size) == (vision.image_size, vision.patch_size)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert ours.norm_eps == vision.layer_norm_eps
    assert read(kind).merge == theirs.scale_factor
    large = {**fields, "text_config": {**fields["text_config"], "vocab_size": 1 << 18}}
    del large["image_token_id"]
    assert read(kind, **{**large, "image_token_id": None}).placeholder == theirs.image_token_id
    assert (ours.rescale, ours.mean, ours.std) == (1 / 255, (0.5,) * 3, (0.5,) * 3)


SERVED = {
    *KINDS,
    *OF_QWEN,
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "mistral3",
    "muse_glimmer",
    "qwen2_5_vl",
    "qwen2_vl",
}


@pytest.mark.parametrize("outer", sorted(OUTERS.keys() - SERVED))
def test_encoders_of_other_types_are_not_served(outer: str) -> None:
    assert config_of(fields_of(outer)).vision is None


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_an_encoder_has_none(kind: str) -> None:
    assert config_of(fields_of(kind, vision_config=None)).vision is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be gelu_pytorch_tanh"),
        ({"num_channels": 1}, "num_channels is 1; it must be 3"),
        ({"num_attention_heads": 5}, "32 dimensions do not divide into 5 heads"),
        ({"image_size": 96}, "a tile of 96 pixels has 3 patches of 32 in a row, which do not divide into groups of 2"),
        ({"image_size": 16}, "a tile of 16 pixels has 0 patches of 32"),
        ({"image_size": [64, 64]}, "image_size is"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576"),
        ({"attn_logit_softcapping": 3.0}, "vision_config: attn_logit_softcapping 3.0 is not supported"),
    ],
)
def test_encoders_that_are_not_served_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        of_vision(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vision_config": [1]}, r"vision_config is '\[1\]'; it must be an object"),
        ({"image_token_id": 64}, "image_token_id is 64; it must be a whole number from 0 to 63"),
        ({"scale_factor": 0}, "scale_factor is 0"),
        ({"scale_factor": 4}, "groups of 4"),
    ],
)
def test_wrong_values_around_the_encoder_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"mm_tokens_per_image": 3},
            "mm_tokens_per_image is 3; a tile of 4 x 4 patches must divide",
        ),
        ({"mm_tokens_per_image": 9}, "a tile of 4 x 4 patches"),
        ({"boi_token_id": 64}, "boi_token_index is 64; it must be a whole number from 0 to 63"),
        ({"image_token_id": -1}, "image_token_index is -1"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'; it must be gelu_pytorch_tanh"),
        ({"vision_config": {"hidden_size": 30, "num_attention_heads": 4}}, "30 dimensions do not divide into 4 heads"),
    ],
)
def test_encoders_of_gemma3_that_are_not_served_are_refused_with_the_numbers(
    more: dict[str, Any], message: str
) -> None:
    fields = fields_of("gemma3")
    vision = {**fields["vision_config"], **more.pop("vision_config", {})}
    with pytest.raises(ModelError, match=message):
        config_of({**fields, "vision_config": vision, **more})


def test_defaults_of_gemma3_are_those_of_transformers() -> None:
    fields = fields_of("gemma3", vision_config={}, mm_tokens_per_image=49, boi_token_id=None, eoi_token_id=None)
    text = {**fields["text_config"], "vocab_size": 1 << 19}
    ours, theirs = (
        config_of({**fields, "text_config": text, "image_token_id": None}).vision,
        AutoConfig.for_model("gemma3"),
    )
    assert isinstance(ours, PooledSiglipConfig)
    vision = SiglipVisionConfig()
    assert (ours.image_size, ours.patch_size) == (vision.image_size, vision.patch_size)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert ours.norm_eps == vision.layer_norm_eps
    assert (ours.placeholder, ours.begin, ours.end) == (
        theirs.image_token_id,
        theirs.boi_token_id,
        theirs.eoi_token_id,
    )


def test_fields_that_nobody_knows_are_named_with_their_place() -> None:
    assert of_vision(window_layers=[1], use_base_siglip=True).unknown_options == ("vision_config.window_layers",)


@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, math.nan, "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_an_encoder(value: Any) -> None:
    named = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
    for name in (*named, "image_size", "patch_size", "hidden_act", "layer_norm_eps", "model_type"):
        try:
            config = of_vision(**{name: value})
        except ModelError:
            continue
        assert config.vision is not None
        assert config.vision.max_tokens > 0
    for name in ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize"):
        try:
            vision = read(processor={name: value})
        except ModelError:
            continue
        assert all(map(math.isfinite, (vision.rescale, *vision.mean, *vision.std)))


def test_numbers_of_pixels_are_those_of_the_image_processor() -> None:
    fields = {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.7, "rescale_factor": 0.25}
    vision = read(processor=fields)
    assert (vision.rescale, vision.mean, vision.std) == (0.25, (0.1, 0.2, 0.3), (0.7, 0.7, 0.7))
    plain = read(processor={**fields, "do_rescale": False, "do_normalize": False})
    assert (plain.rescale, plain.mean, plain.std) == (1.0, (0.0,) * 3, (1.0,) * 3)
    with pytest.raises(ModelError, match="image processor: image_std is 0; it must be three numbers of at least 1e-06"):
        read(processor={"image_std": 0})
