"""config.json of Kimi K2.5 and of Muse Glimmer: what is read of their encoders, what is assumed, what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of
from forebay.families.config.vision.base import HALVES
from forebay.families.config.vision.kimi_k25 import KimiVisionConfig
from forebay.families.config.vision.muse_glimmer import MuseVisionConfig
from tests.families.given import HOSTILE
from tests.families.test_outer import OWN, fields_of

# As Kimi K2.5 publishes them.
KIMI: Final[dict[str, Any]] = {
    "_attn_implementation": "flash_attention_2", "init_pos_emb_height": 64, "init_pos_emb_time": 4,
    "init_pos_emb_width": 64, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger", "patch_size": 14, "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
KIMI_PROCESSOR: Final[dict[str, Any]] = {
    "media_proc_cfg": {
        "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 16384, "merge_kernel_size": 2, "patch_limit_on_one_side": 512, "patch_size": 14,
    }
}  # fmt: skip


def read(
    kind: str, *, outer: dict[str, Any] | None = None, processor: dict[str, Any] | None = None, **vision: Any
) -> Any:
    own = {**OWN[kind]["vision_config"], **vision}
    return config_of(fields_of(kind, **(outer or {}) | {"vision_config": own}), processor=processor).vision


def test_published_encoder_of_kimi_is_read() -> None:
    fields = fields_of("kimi_k25", vision_config=KIMI, image_token_id=None, media_placeholder_token_id=5)
    found = config_of({**fields, "projection_hidden_size": None}, processor=KIMI_PROCESSOR)
    assert found.unknown_options == ()
    vision = found.vision
    assert isinstance(vision, KimiVisionConfig)
    theirs = AutoConfig.for_model("kimi_k25").vision_config
    assert (vision.placeholder, vision.token_edge, vision.side) == (5, 28, theirs.pos_emb_height)
    assert (vision.hidden_size, vision.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (vision.num_layers, vision.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (vision.most_patches, vision.most_of_a_side) == (16_384, 512)
    assert (vision.mean, vision.std, vision.max_edge) == (HALVES, HALVES, 7168)


def test_silence_of_kimi_means_what_it_means_to_transformers() -> None:
    theirs = AutoConfig.for_model("kimi_k25")
    large = fields_of("kimi_k25", vision_config={}, image_token_id=None, projection_hidden_size=None)
    large["text_config"]["vocab_size"] = 1 << 18
    ours, vision = config_of(large).vision, theirs.vision_config
    assert isinstance(ours, KimiVisionConfig)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert (ours.patch_size, [ours.merge] * 2) == (vision.patch_size, list(vision.merge_kernel_size))
    assert (ours.side, ours.theta) == (vision.pos_emb_height, vision.rope_parameters["rope_theta"])
    assert (ours.placeholder, ours.hidden_size) == (theirs.image_token_id, theirs.projection_hidden_size)
    assert ours.projector_eps == theirs.projection_layer_norm_eps


def test_silence_of_muse_glimmer_means_what_it_means_to_transformers() -> None:
    theirs = AutoConfig.for_model("muse_glimmer")
    large = fields_of("muse_glimmer", vision_config={}, image_token_id=None, out_hidden_size=None)
    large["text_config"]["vocab_size"] = 1 << 18
    ours, vision = config_of(large).vision, theirs.vision_config
    assert isinstance(ours, MuseVisionConfig)
    assert (ours.hidden_size, ours.intermediate_size) == (vision.hidden_size, vision.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (vision.num_hidden_layers, vision.num_attention_heads)
    assert (ours.patch_size, ours.merge, ours.depth) == (vision.patch_size, vision.merge_size, vision.patch_temporal)
    assert (ours.side, ours.theta) == (vision.pos_emb_height, vision.rope_parameters["rope_theta"])
    assert (ours.norm_eps, ours.most_tokens) == (vision.layer_norm_eps, 4096)
    whole = {layer for layer, kind in enumerate(vision.layer_types) if kind == "full_attention"}
    assert (ours.whole, ours.projector_size) == (whole, theirs.projector_hidden_size)
    assert (ours.placeholder, ours.mean, ours.std) == (theirs.image_token_id, HALVES, HALVES)


def test_windows_of_muse_glimmer_are_those_of_the_listed_layers() -> None:
    kinds = ["full_attention", "window_attention"]
    vision = read("muse_glimmer", num_hidden_layers=2, layer_types=kinds, pos_emb_height=6, pos_emb_width=6)
    assert vision.whole == {0}
    assert vision.seen_tokens == (4096, 9)


WRONG: Final[tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...]] = (
    ("kimi_k25", {"hidden_act": "gelu"}, {}, "hidden_act"),
    ("kimi_k25", {"merge_type": "x"}, {}, "merge_type"),
    ("kimi_k25", {"mm_projector_type": "x"}, {}, "mm_projector_type"),
    ("kimi_k25", {"pos_emb_type": "x"}, {}, "pos_emb_type"),
    ("kimi_k25", {"merge_kernel_size": [2, 1]}, {}, "merge_kernel_size"),
    ("kimi_k25", {"merge_kernel_size": [0, 0]}, {}, "merge_kernel_size"),
    ("kimi_k25", {"pos_emb_width": 32}, {}, "pos_emb_width is 32; it must be 64"),
    ("kimi_k25", {"mm_hidden_size": 31}, {}, "mm_hidden_size is 31; it must be 32"),
    ("kimi_k25", {"num_attention_heads": 5}, {}, "32 dimensions do not divide into 5 heads"),
    ("kimi_k25", {"num_attention_heads": 16}, {}, "heads of 2 do not divide into four parts"),
    ("kimi_k25", {"patch_size": 2048}, {}, "are too large"),
    ("kimi_k25", {}, {"projection_hidden_size": 1152}, "projection_hidden_size is 1152; it must be 32"),
    ("kimi_k25", {}, {"image_token_id": 1 << 20}, "image_token_id"),
    ("muse_glimmer", {"hidden_act": "gelu_pytorch_tanh"}, {}, "hidden_act"),
    ("muse_glimmer", {"pos_emb_width": 16}, {}, "pos_emb_width is 16; it must be 32"),
    ("muse_glimmer", {"num_attention_heads": 16}, {}, "heads of 2 do not divide into four parts"),
    ("muse_glimmer", {"layer_types": ["full_attention"]}, {}, "layer_types is"),
    ("muse_glimmer", {"patch_size": 2048}, {}, "are too large"),
    ("muse_glimmer", {}, {"out_hidden_size": 32}, "out_hidden_size is 32; 2 x 2 patches have 128 numbers"),
    ("muse_glimmer", {}, {"projector_hidden_act": "relu"}, "projector_hidden_act"),
)


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "vision", "outer", "named"), WRONG)
def test_a_wrong_field_of_an_encoder_is_named(
    kind: str, vision: dict[str, Any], outer: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read(kind, outer=outer, **vision)


@pytest.mark.parametrize(
    ("kind", "processor", "named"),
    [
        ("kimi_k25", {"patch_size": 16}, "patch_size is 16; it must be 14"),
        ("kimi_k25", {"merge_size": 4}, "merge_size is 4; it must be 2"),
        ("kimi_k25", {"media_proc_cfg": {"merge_kernel_size": 4}}, "merge_size is 4; it must be 2"),
        ("kimi_k25", {"media_proc_cfg": {"fixed_output_tokens": 9}}, "fixed_output_tokens is 9"),
        ("kimi_k25", {"media_proc_cfg": 3}, "media_proc_cfg is 3"),
        ("kimi_k25", {"size": {"max_height": 8, "max_width": 9}}, "max_width is 9; it must be 8"),
        ("kimi_k25", {"max_patches": 0}, "max_patches"),
        ("muse_glimmer", {"patch_size": 16}, "patch_size is 16; it must be 14"),
        ("muse_glimmer", {"temporal_patch_size": 1}, "temporal_patch_size is 1; it must be 2"),
        ("muse_glimmer", {"max_image_tokens": 0}, "max_image_tokens"),
    ],
)
def test_an_image_processor_that_does_not_fit_is_named(kind: str, processor: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(kind, processor=processor)


@pytest.mark.parametrize("kind", ["kimi_k25", "muse_glimmer"])
def test_limits_of_images_are_no_larger_than_those_of_an_encoder(kind: str) -> None:
    name = {"kimi_k25": "max_patches", "muse_glimmer": "max_image_tokens"}[kind]
    assert read(kind, processor={name: 1 << 20}) == read(kind, processor={name: 1 << 16})
    assert read(kind, processor={name: 64}).max_tokens < read(kind).max_tokens


@pytest.mark.parametrize("kind", ["kimi_k25", "muse_glimmer"])
def test_hostile_values_of_an_encoder_are_read_or_named(kind: str) -> None:
    names = ("merge_kernel_size", "merge_size", "pos_emb_height", "patch_size", "rope_parameters", "layer_types")
    for name in names:
        for value in HOSTILE:
            with suppress(ModelError):
                assert read(kind, **{name: value}).max_tokens > 0
    for name in ("media_proc_cfg", "size", "max_patches", "max_image_tokens", "image_mean"):
        for value in HOSTILE:
            with suppress(ModelError):
                assert read(kind, processor={name: value}).max_tokens > 0
