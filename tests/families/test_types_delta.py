"""config.json of models with delta rules and latent attention: what is read, what is assumed, what is refused."""

from __future__ import annotations

from operator import attrgetter

import pytest
from transformers import AutoConfig

from forebay import models
from forebay.base.errors import ModelError
from tests.families.given import GIVEN, IN_PARTS, tried

LINEAR, FULL = "linear_attention", "full_attention"

# Where a type's own values are here, and what transformers calls them.
DELTA_NET = {
    "layer_types": "layer_types",
    "delta.num_key_heads": "linear_num_key_heads",
    "delta.num_value_heads": "linear_num_value_heads",
    "delta.key_head_dim": "linear_key_head_dim",
    "delta.value_head_dim": "linear_value_head_dim",
    "delta.width": "linear_conv_kernel_dim",
}
QWEN_EXPERTS = {
    "experts.num_experts": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "shared_intermediate_size": "shared_expert_intermediate_size",
}
LATENT = {
    "latent.rank": "kv_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value_dim": "v_head_dim",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.groups": "n_group",
    "experts.best_groups": "topk_group",
    "experts.normalize": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
}
KIMI = {
    **LATENT,
    "layer_types": "layer_types",
    "mlp_layer_types": "mlp_layer_types",
    "experts.num_experts": "num_local_experts",
    "delta.num_heads": "linear_num_heads",
    "delta.head_dim": "linear_head_dim",
    "delta.width": "linear_conv_kernel_dim",
}
NAMES: dict[str, dict[str, str]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": {**DELTA_NET, **QWEN_EXPERTS, "norm_topk_prob": "norm_topk_prob"},
    "qwen3_5_moe_text": {**DELTA_NET, **QWEN_EXPERTS},
    "deepseek_v3": {
        **LATENT,
        "experts.num_experts": "n_routed_experts",
        "latent.interleaved": "rope_interleave",
        "latent.q_rank": "q_lora_rank",
    },
    "deepseek_v32": {
        **LATENT,
        "experts.num_experts": "n_routed_experts",
        "latent.q_rank": "q_lora_rank",
        "index.num_heads": "index_n_heads",
        "index.head_dim": "index_head_dim",
        "index.top_k": "index_topk",
    },
    "glm_moe_dsa": {
        **LATENT,
        "experts.num_experts": "n_routed_experts",
        "latent.q_rank": "q_lora_rank",
        "index.num_heads": "index_n_heads",
        "index.head_dim": "index_head_dim",
        "index.top_k": "index_topk",
        "indexer_types": "indexer_types",
    },
    "kimi_linear": {**KIMI, "latent.q_rank": "q_lora_rank"},
    "bailing_hybrid": {**KIMI, "delta.lower_bound": "kda_lower_bound"},
    "olmo_hybrid": {**DELTA_NET, "linear_allow_neg_eigval": "linear_allow_neg_eigval"},
}
TYPES = tuple(NAMES)
FEW_EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


@pytest.mark.parametrize("model_type", TYPES)
def test_silence_means_what_it_means_to_transformers(model_type, read):
    ours, theirs = read(model_type), AutoConfig.for_model(model_type, **GIVEN)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == theirs.attention_bias
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert ours.num_layers == theirs.num_hidden_layers
    if model_type != "kimi_linear":  # which has no positions
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    for path, name in NAMES[model_type].items():
        value, expected = attrgetter(path)(ours), getattr(theirs, name)
        assert value == (0 if expected is None else tuple(expected) if isinstance(expected, list) else expected), name


@pytest.mark.parametrize(
    "rope", [{}, {"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 1}}]
)
def test_the_share_of_a_head_that_is_rotated_is_read_wherever_it_is(rope, read):
    theirs = AutoConfig.for_model("qwen3_next", **GIVEN, **rope).rope_parameters["partial_rotary_factor"]
    assert read("qwen3_next", **rope).rotary_dim == 256 * theirs


def test_published_kimi_files_have_what_is_linear_in_an_object_of_its_own(read):
    linear = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 32, "num_heads": 3}
    fields = {"linear_attn_config": linear, "q_lora_rank": None, "head_dim": 72}
    ours, theirs = read("kimi_linear", **fields), AutoConfig.for_model("kimi_linear", **GIVEN, **fields)
    assert list(ours.layer_types) == theirs.layer_types == ([LINEAR] * 3 + [FULL]) * 2
    assert (ours.delta.num_heads, ours.delta.head_dim) == (3, 32)
    assert (theirs.linear_num_heads, theirs.linear_head_dim) == (3, 32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": None}},
        {"rope_theta": None},
        {"rope_theta": 5.0},
    ],
    ids=str,
)
def test_olmo_hybrids_have_no_positions_where_the_base_is_null(fields, read):
    theirs = AutoConfig.for_model("olmo_hybrid", **GIVEN, **fields)
    assert read("olmo_hybrid", **fields).has_rope == (theirs.rope_parameters["rope_theta"] is not None)


def test_what_transformers_writes_of_ling_is_read_as_what_it_read(read):
    fields = {"head_dim": 32, "short_conv_kernel_size": 3, "kda_safe_gate": False}
    theirs = AutoConfig.for_model("bailing_hybrid", **GIVEN, **fields)
    ours = read(**theirs.to_dict())
    assert (theirs.head_dim, ours.head_dim) == (64, 64)
    assert (ours.delta.head_dim, ours.delta.width) == (32, 3)
    assert ours.delta.lower_bound == 0


def test_a_language_model_is_found_within_a_multimodal_one(read):
    inner = {**GIVEN, "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    config = read("qwen3_5", text_config=inner, vision_config=None, tie_word_embeddings=True)
    assert (config.model_type, config.tie_word_embeddings) == ("qwen3_5_text", True)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen3_5_text", {"layer_types": [FULL] * 7}, "layer_types"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_value_heads"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ("qwen3_5_text", {"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        ("qwen3_5_text", {"partial_rotary_factor": 2}, "partial_rotary_factor"),
        ("qwen3_5_text", {"rope_parameters": {"rope_type": "default", "surprise": 1}}, "surprise"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_next", {"num_experts_per_tok": 600}, "num_experts_per_tok"),
        ("deepseek_v3", {"n_group": 7}, "n_group"),
        ("deepseek_v3", {"n_group": 256}, "n_group"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "head_dim"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        ("glm_moe_dsa", {"index_topk_pattern": "SF" * 39}, "index_topk_pattern"),
        ("glm_moe_dsa", {"index_topk_pattern": "FX" * 39}, "index_topk_pattern"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi_linear", {"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types"),
        ("kimi_linear", {"linear_attn_config": [LINEAR]}, "linear_attn_config"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, "kda_layers"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound"),
        ("bailing_hybrid", {"short_conv_kernel_size": 1}, "linear_conv_kernel_dim"),
        ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("olmo_hybrid", {"linear_num_value_heads": 6}, "linear_num_value_heads"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


HOSTILE = [None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "x", [], [[]], {}, {"a": 1}, [None] * 8, [LINEAR] * 8]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_model(model_type, read, part):
    fields = AutoConfig.for_model(model_type, **{**GIVEN, **FEW_EXPERTS}).to_dict()
    for name, value in tried(fields.keys() - {"model_type"}, HOSTILE, part):
        try:
            config = read(**{**fields, name: value})
        except ModelError:
            continue
        assert len(models.describe(config).blocks) == config.num_layers
