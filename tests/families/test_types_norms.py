"""config.json of models with LayerNorm, capped scores or windows of their own: what is read, assumed and refused."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig, config_of
from tests.cli.public_norms import MIMO_V2_FLASH, PUBLISHED
from tests.families.given import GIVEN, HOSTILE, IN_PARTS, tried

FULL, SLIDING = "full_attention", "sliding_attention"

LOGITS = {"logit_scale": "logit_scale"}
EXPERTS = {
    "experts.num_experts": "n_routed_experts",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.scale": "routed_scaling_factor",
}
# Where a type's own values are here, and what transformers calls them.
NAMES: dict[str, dict[str, str]] = {
    "gemma2": {
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "scores_cap": "attn_logit_softcapping",
        "logits_cap": "final_logit_softcapping",
    },
    "cohere": {**LOGITS, "use_qk_norm": "use_qk_norm"},
    "cohere2": LOGITS,
    "stablelm": {
        "attention_bias": "use_qkv_bias",
        "parallel": "use_parallel_residual",
        "use_qk_norm": "qk_layernorm",
    },
    "starcoder2": {"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    "deepseek_v2": {
        **EXPERTS,
        "latent.rank": "kv_lora_rank",
        "latent.q_rank": "q_lora_rank",
        "latent.nope_dim": "qk_nope_head_dim",
        "latent.rope_dim": "qk_rope_head_dim",
        "latent.value_dim": "v_head_dim",
        "experts.normalize": "norm_topk_prob",
    },
    "mimo_v2_flash": {
        **EXPERTS,
        "experts.per_token": "num_experts_per_tok",
        "experts.groups": "n_group",
        "experts.best_groups": "topk_group",
        "experts.normalize": "norm_topk_prob",
        "value_dim": "v_head_dim",
        "value_scale": "attention_value_scale",
    },
}
TYPES = tuple(NAMES)
EPS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}

# The fields that a type cannot do without.
NEEDED: dict[str, dict[str, Any]] = {name: {} for name in TYPES} | {"deepseek_v2": {"num_experts_per_tok": 6}}

Read = Callable[..., ModelConfig]


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_transformers(model_type: str, read: Read) -> None:
    theirs = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type])
    ours = read(model_type)
    assert ours.rms_norm_eps == getattr(theirs, EPS.get(model_type, "rms_norm_eps"))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or 0)
    if model_type in ("gemma2", "cohere2", "mimo_v2_flash"):
        assert ours.layer_types == tuple(theirs.layer_types)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get(FULL, rope)["rope_theta"]
    for path, name in NAMES[model_type].items():
        assert attrgetter(path)(ours) == getattr(theirs, name), name


def test_gemma_2_without_caps_says_so_with_nulls(read: Read) -> None:
    config = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.scores_cap, config.logits_cap) == (0.0, 0.0)


def test_command_r_has_the_positions_that_it_was_trained_for(read: Read) -> None:
    assert read("cohere", model_max_length=4096).max_position_embeddings == 4096
    assert read("cohere", model_max_length=64).max_position_embeddings == 512
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert read("cohere", model_max_length=4096, rope_parameters=scaled).max_position_embeddings == 512


def test_stablelm_rotates_a_quarter_of_each_head_by_default(read: Read) -> None:
    theirs = AutoConfig.for_model("stablelm", **GIVEN).rope_parameters["partial_rotary_factor"]
    assert read("stablelm").rotary_dim == 16 * theirs == 4


def test_deepseek_v2_has_groups_where_the_method_has_them(read: Read) -> None:
    groups = {"n_group": 8, "topk_group": 3}
    assert read("deepseek_v2", topk_method="greedy", **groups).experts.groups == 1
    grouped = read("deepseek_v2", topk_method="group_limited_greedy", **groups).experts
    assert (grouped.groups, grouped.best_groups, grouped.summed) == (8, 3, 1)


def test_a_published_mimo_file_is_read_as_transformers_reads_it() -> None:
    ours, theirs = config_of(MIMO_V2_FLASH), AutoConfig.for_model(**MIMO_V2_FLASH)
    assert ours.sliding_window == theirs.sliding_window == 129
    assert ours.layer_types == tuple(theirs.layer_types)
    assert ours.mlp_layer_types == tuple(theirs.mlp_layer_types)
    assert {kind: rope.theta for kind, rope in ours.ropes.items()} == {
        kind: rope["rope_theta"] for kind, rope in theirs.rope_parameters.items()
    }
    assert {rope.dim for rope in ours.ropes.values()} == {64}
    assert ours.experts.scale == theirs.routed_scaling_factor == 1.0


def test_mimo_lists_of_zeros_and_ones_say_which_layers_are_which(read: Read) -> None:
    config = read("mimo_v2_flash", hybrid_layer_pattern=[1, 0] * 4, moe_layer_freq=[0, 0] + [1] * 6)
    assert config.layer_types == (SLIDING, FULL) * 4
    assert config.mlp_layer_types == ("dense",) * 2 + ("sparse",) * 6


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_no_option_that_is_unknown(name: str) -> None:
    assert config_of(PUBLISHED[name][0]).unknown_options == ()


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"layer_types": [FULL]}, "layer_types"),
        ("gemma2", {"head_dim": 15}, "head_dim"),
        ("cohere", {"logit_scale": 0}, "logit_scale"),
        ("cohere", {"logit_scale": [0.25]}, "logit_scale"),
        ("cohere", {"use_qk_norm": "yes"}, "use_qk_norm"),
        ("cohere", {"hidden_act": "gelu"}, "hidden_act"),
        ("cohere", {"model_max_length": 2**70}, "model_max_length"),
        ("cohere2", {"sliding_window": None}, "sliding_window"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("cohere2", {"layer_types": ["linear_attention"] * 8}, "layer_types"),
        ("cohere2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("stablelm", {"hidden_act": "gelu"}, "hidden_act"),
        ("stablelm", {"qk_layernorm": 1}, "qk_layernorm"),
        ("stablelm", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("stablelm", {"head_dim": 32}, "num_attention_heads"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act"),
        ("starcoder2", {"use_bias": 1}, "use_bias"),
        ("starcoder2", {"layer_types": [SLIDING] * 8}, "layer_types"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("deepseek_v2", {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 1}, "n_group"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 9}, "topk_group"),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("mimo_v2_flash", {"sliding_window": None}, "sliding_window"),
        ("mimo_v2_flash", {"sliding_window_size": 0}, "sliding_window_size"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [2] * 8}, "hybrid_layer_pattern"),
        ("mimo_v2_flash", {"moe_layer_freq": 1}, "moe_layer_freq"),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads"),
        ("mimo_v2_flash", {"swa_v_head_dim": 64}, "swa_v_head_dim"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts"),
        ("mimo_v2_flash", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon"),
        ("mimo_v2_flash", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("mimo_v2_flash", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("mimo_v2_flash", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("mimo_v2_flash", {"n_group": 3}, "n_group"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type: str, fields: dict[str, Any], message: str, read: Read) -> None:
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


OLD = {"rope_theta", "rope_scaling", "sliding_window_pattern", "model_max_length", "hybrid_layer_pattern"}
OLD |= {"moe_layer_freq", "sliding_window_size", "swa_rope_theta", "partial_rotary_factor", "swa_num_key_value_heads"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(model_type: str, read: Read, part) -> None:
    their_fields = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type]).to_dict()
    assert read(model_type).num_layers == 8
    for name, value in tried({*their_fields, *OLD} - {"model_type"}, HOSTILE, part):
        try:
            config = read(model_type, **{name: value})
        except ModelError:
            continue
        assert len(config.layer_types) == config.num_layers > 0
