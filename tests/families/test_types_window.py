"""config.json of models with short convolutions, windows and sinks: what is read, what is assumed, what is refused."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_from_folder
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from tests.families.given import GIVEN, HOSTILE, IN_PARTS, tried

CONV, FULL, SLIDING = "conv", "full_attention", "sliding_attention"

CONVOLUTION = {"conv_width": "conv_L_cache", "conv_bias": "conv_bias"}
EXPERTS = {
    "experts.num_experts": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
}
# Where a type's own values are here, and what transformers calls them.
NAMES: dict[str, dict[str, str]] = {
    "lfm2": CONVOLUTION,
    "lfm2_moe": {
        **CONVOLUTION,
        **EXPERTS,
        "num_dense_layers": "num_dense_layers",
        "use_expert_bias": "use_expert_bias",
        "norm_topk_prob": "norm_topk_prob",
        "routed_scaling_factor": "routed_scaling_factor",
    },
    "lfm3": {
        **CONVOLUTION,
        "use_sandwich_norm": "use_sandwich_norm",
        "use_attention_gate": "use_attention_gate",
    },
    "gemma3_text": {"query_pre_attn_scalar": "query_pre_attn_scalar"},
    "gemma3n_text": {
        "intermediate_sizes": "intermediate_size",
        "per_layer_size": "hidden_size_per_layer_input",
        "per_layer_vocab_size": "vocab_size_per_layer_input",
        "streams": "altup_num_inputs",
        "active_stream": "altup_active_idx",
        "scaled": "altup_correct_scale",
        "laurel_rank": "laurel_rank",
        "logits_cap": "final_logit_softcapping",
    },
    "gemma4_text": {
        "values_from_keys": "attention_k_eq_v",
        "per_layer_size": "hidden_size_per_layer_input",
        "per_layer_vocab_size": "vocab_size_per_layer_input",
        "wide_readers": "use_double_wide_mlp",
    },
    "muse_glimmer_text": {
        "query_factor": "qk_scale_factor",
        "logits_factor": "output_multiplier",
        "logits_cap": "final_logit_softcapping",
        "after_eps": "post_norm_eps",
    },
    "gpt_oss": {
        "experts.num_experts": "num_local_experts",
        "experts.per_token": "num_experts_per_tok",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    },
}
TYPES = tuple(NAMES)

# The fields that a type cannot do without.
NEEDED: dict[str, dict[str, Any]] = {name: {} for name in TYPES} | {
    "lfm2_moe": {"layer_types": [CONV, FULL] * 4},
    "gemma3n_text": {"num_kv_shared_layers": 2},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_transformers(model_type, read):
    theirs = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type])
    theirs.allow_global_per_layer_attribute_access = True  # of those whose layers differ in it, too
    ours = read(model_type)
    assert ours.rms_norm_eps == (theirs.norm_eps if model_type.startswith("lfm") else theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or 0)
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.layer_types == tuple(theirs.layer_types)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get(FULL, rope)["rope_theta"]
    for path, name in NAMES[model_type].items():
        expected = getattr(theirs, name)
        assert attrgetter(path)(ours) == (tuple(expected) if isinstance(expected, list) else expected), name


@pytest.mark.parametrize("model_type", ["lfm3", "gemma3_text", "gemma3n_text", "gemma4_text"])
def test_each_kind_of_attention_has_its_own_rope(model_type, read):
    theirs = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type]).rope_parameters
    for kind, (theta, scaling) in read(model_type).ropes.items():
        assert {"rope_type": "default", "rope_theta": theta, **(scaling or {})} == theirs[kind]


GEMMA4 = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL] + [SLIDING] * 3,
}


def test_gemma3n_cuts_gates_where_the_share_of_a_normal_distribution_ends(read):
    assert read("gemma3n_text").deviations == (None,) * 8
    theirs = AutoConfig.for_model("gemma3n_text", **GIVEN | {"num_hidden_layers": 12}).activation_sparsity_pattern
    config = read("gemma3n_text", num_hidden_layers=12)
    assert [cut is None for cut in config.deviations] == [share == 0 for share in theirs]
    assert config.deviations[0] == pytest.approx(1.6448536)


def test_gemma3n_reads_the_kv_of_the_last_layer_of_a_kind_that_keeps_any(read):
    fields = {"layer_types": [SLIDING, FULL, SLIDING, FULL] + [SLIDING] * 4, "num_kv_shared_layers": 5}
    config = read("gemma3n_text", **fields)
    assert config.kv_owners == (0, 1, 2, 1, 2, 2, 2, 2)
    theirs = AutoConfig.for_model("gemma3n_text", **GIVEN, **fields).kv_sharing_modes
    assert [owner != layer for layer, owner in enumerate(config.kv_owners)] == [mode == "reuse" for mode in theirs]


def test_muse_glimmer_has_a_rope_in_the_layers_of_transformers(read):
    for given in ({}, {"layer_rope_theta": [10_000.0, 0] * 4}):
        theirs = AutoConfig.for_model("muse_glimmer_text", **GIVEN, **given).layer_rope_theta
        assert read("muse_glimmer_text", **given).has_rope == tuple(theta > 0 for theta in theirs)


@pytest.mark.parametrize("from_keys", [False, True])
def test_gemma4_has_heads_of_two_shapes_as_published_and_as_transformers_saves_them(from_keys, read):
    published = {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": from_keys}
    config = read("gemma4_text", **GEMMA4, **published)
    theirs = AutoConfig.for_model("gemma4_text", **GIVEN | GEMMA4, **published)
    saved = json.loads(theirs.to_json_string())
    assert config.heads == {SLIDING: (2, 256), FULL: (1 if from_keys else 2, 24)}
    assert "global_head_dim" not in saved
    assert read(**saved).heads == config.heads
    assert [config.heads[kind].dim for kind in config.layer_types] == [c.head_dim for c in theirs.per_layer_config]


def test_gemma4_reads_the_kv_of_the_last_layer_of_a_kind_that_keeps_any(read):
    config = read("gemma4_text", **GEMMA4)
    assert config.layer_types[-1] == FULL  # whatever the file says
    assert config.kv_owners == (0, 1, 2, 1, 2, 2, 1)
    theirs = AutoConfig.for_model("gemma4_text", **GIVEN | GEMMA4).kv_sharing_modes
    assert [owner != layer for layer, owner in enumerate(config.kv_owners)] == [mode == "reuse" for mode in theirs]


def test_old_gemma3_files_name_both_bases_and_one_scaling(read):
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    theirs = AutoConfig.for_model("gemma3_text", **GIVEN, **old).rope_parameters
    ropes = read("gemma3_text", **old).ropes
    assert ropes == {FULL: (5e5, {"rope_type": "linear", "factor": 8.0}), SLIDING: (2e3, None)}
    assert theirs[FULL] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    assert theirs[SLIDING] == {"rope_type": "default", "rope_theta": 2e3}


def test_a_published_gemma3_file_needs_no_more_than_it_says(tmp_path):
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    vision = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = config_from_folder(tmp_path)
    assert (config.model_type, config.vocab_size, config.num_heads, config.head_dim) == ("gemma3_text", 262208, 8, 256)
    assert config.layer_types[4:7] == (SLIDING, FULL, SLIDING)
    assert config.eos_token_ids == (1, 106)
    assert isinstance(config.vision, PooledSiglipConfig)
    assert (config.vision.placeholder, config.vision.begin, config.vision.end) == (262144, 255999, 256000)
    assert (config.vision.max_tokens, config.vision.merge, config.vision.longest_span) == (256, 4, 256)
    assert config.unknown_options == ()


@pytest.mark.parametrize("inner", [None, [], {"model_type": "llama"}])
def test_a_multimodal_file_without_a_language_model_is_refused(inner, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))
    with pytest.raises(ModelError, match="text_config"):
        config_from_folder(tmp_path)


def test_the_first_lfm2_files_have_other_names(read):
    old = read("lfm2", block_ff_dim=1536, tie_embedding=False, full_attn_idxs=[2, 5])
    assert (old.intermediate_size, old.tie_word_embeddings) == (1024, False)
    assert [i for i, kind in enumerate(old.layer_types) if kind == FULL] == [2, 5]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 256),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_multiple_of": 1}, 64),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.3}, 90),
    ],
)
def test_lfm2_adjusts_its_intermediate_size(fields, expected, read):
    assert read("lfm2", **fields).intermediate_size == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
        ("lfm2", {"layer_types": [SLIDING] * 8}, "layer_types"),
        ("lfm2", {"layer_types": [CONV]}, "layer_types"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier"),
        ("lfm2_moe", {"layer_types": None}, "layer_types"),
        ("lfm2_moe", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("lfm3", {"rope_theta": 1e4}, "rope_theta"),
        ("lfm3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("lfm3", {"rope_parameters": {FULL: {"rope_type": "proportional"}, SLIDING: {}}}, "partial_rotary_factor"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"use_bidirectional_attention": 1}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"layer_types": [CONV] * 8}, "layer_types"),
        ("gemma4_text", {"sliding_window": None}, "sliding_window"),
        ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"rope_theta": 1e4}, "rope_theta"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("gemma4_text", {"num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ("gemma4_text", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input"),
        ("gemma4_text", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma4_text", {"global_head_dim": 15}, "global_head_dim"),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "global_head_dim"),
        ("gemma4_text", {"per_layer_config": {"8": {"head_dim": 16}}}, "per_layer_config"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config"),
        ("gemma4_text", {"per_layer_config": {"5": {"sliding_window": 16}}}, "per_layer_config"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(model_type, read, part):
    their_fields = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type]).to_dict()
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "full_attn_idxs")
    assert read(model_type).num_layers == 8
    for name, value in tried({*their_fields, *old} - {"model_type"}, HOSTILE, part):
        try:
            config = read(model_type, **{name: value})
        except ModelError:
            continue
        assert len(config.layer_types) == config.num_layers > 0
