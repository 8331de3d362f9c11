"""config.json of models with experts: what is read, what is assumed, what is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from transformers import AutoConfig

from forebay import models
from forebay.base.errors import ModelError
from tests.families.given import GIVEN, IN_PARTS, tried

FULL, SLIDING, DENSE, SPARSE = "full_attention", "sliding_attention", "dense", "sparse"

# Where a type's own values are here, and what transformers calls them.
GROUPED = {
    "experts.num_experts": "n_routed_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.groups": "n_group",
    "experts.best_groups": "topk_group",
    "experts.normalize": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
}
WIDE = {"experts.num_experts": "num_local_experts", "experts.per_token": "num_experts_per_tok"}
NAMES: dict[str, dict[str, str]] = {
    "glm4_moe_lite": {
        **GROUPED,
        "latent.rank": "kv_lora_rank",
        "latent.q_rank": "q_lora_rank",
        "latent.nope_dim": "qk_nope_head_dim",
        "latent.rope_dim": "qk_rope_head_dim",
        "latent.value_dim": "v_head_dim",
        "latent.interleaved": "rope_interleave",
        "mlp_layer_types": "mlp_layer_types",
    },
    "mistral4": {
        **GROUPED,
        "latent.rank": "kv_lora_rank",
        "latent.q_rank": "q_lora_rank",
        "latent.nope_dim": "qk_nope_head_dim",
        "latent.rope_dim": "qk_rope_head_dim",
        "latent.value_dim": "v_head_dim",
        "latent.interleaved": "rope_interleave",
    },
    "glm4_moe": {**GROUPED, "qk_norm": "use_qk_norm"},
    "mixtral": WIDE,
    "phimoe": {**WIDE, "jitter": "router_jitter_noise", "head_bias": "lm_head_bias"},
    "qwen2_moe": {
        "experts.num_experts": "num_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.intermediate_size": "moe_intermediate_size",
        "shared_intermediate_size": "shared_expert_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "qkv_bias": "qkv_bias",
        "layer_types": "layer_types",
    },
    "minimax_m2": WIDE,
    "olmoe": {
        "experts.num_experts": "num_experts",
        "experts.per_token": "num_experts_per_tok",
        "norm_topk_prob": "norm_topk_prob",
    },
    "ernie4_5_moe": {
        "experts.num_experts": "moe_num_experts",
        "experts.per_token": "moe_k",
        "experts.intermediate_size": "moe_intermediate_size",
        "norm_min": "moe_norm_min",
    },
    "hy_v3": {
        "experts.num_experts": "num_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.intermediate_size": "moe_intermediate_size",
        "experts.scale": "router_scaling_factor",
        "mlp_layer_types": "mlp_layer_types",
    },
    "solar_open": GROUPED,
    "dots1": {**GROUPED, "layer_types": "layer_types"},
}
TYPES = tuple(NAMES)
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
FEW_EXPERTS = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip


def theirs_of(model_type: str, **fields: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**GIVEN, **NEEDED.get(model_type, {}), **fields})


@pytest.mark.parametrize("model_type", TYPES)
def test_silence_means_what_it_means_to_transformers(model_type, read):
    ours, theirs = read(model_type), theirs_of(model_type)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.head_dim == getattr(theirs, "head_dim", None) or 16
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    for path, name in NAMES[model_type].items():
        value, expected = attrgetter(path)(ours), getattr(theirs, name)
        assert value == (tuple(expected) if isinstance(expected, list) else expected), name


def test_parts_that_transformers_builds_by_rules_are_built_by_the_same(read):
    assert read("glm4_moe").mlp_layer_types == (DENSE, *[SPARSE] * 7)
    assert read("solar_open").mlp_layer_types == (SPARSE,) * 8
    assert read("dots1").mlp_layer_types == (SPARSE,) * 8
    assert read("ernie4_5_moe").expert_layers == tuple(range(1, 8))
    assert read("ernie4_5_moe").shared_size == 2 * 1536
    assert read("hy_v3").experts.shared_size == 1536
    windows = {"use_sliding_window": True, "max_window_layers": 3}
    expected = theirs_of("qwen2_moe", **windows).layer_types
    assert read("qwen2_moe", **windows).layer_types == tuple(expected) == (SLIDING, FULL, SLIDING, *[FULL] * 5)
    windows = {"max_window_layers": 6}
    expected = theirs_of("dots1", **windows).layer_types
    assert read("dots1", **windows).layer_types == tuple(expected) == (*[FULL] * 6, SLIDING, SLIDING)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rotary_dim": 64},
        {"partial_rotary_factor": 0.25},
        {"rotary_dim": 64, "partial_rotary_factor": 0.25},
        {"rotary_dim": 64, "rope_parameters": {"partial_rotary_factor": 0.75}},
    ],
    ids=str,
)
def test_minimax_rotates_the_dimensions_that_transformers_does(rope, read):
    theirs = theirs_of("minimax_m2", **rope).rope_parameters.get("partial_rotary_factor", 1.0)
    assert read("minimax_m2", **rope).rotary_dim == 128 * theirs


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {"num_experts": 4}),
        ("minimax_m2", {"num_experts": 8}),
        ("hy_v3", {"num_local_experts": 8}),
        ("ernie4_5_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    ],
)
def test_the_other_name_of_a_field_is_read(model_type, fields, read):
    ours, theirs = read(model_type, **fields), theirs_of(model_type, **fields)
    assert ours.num_experts == theirs.num_experts == next(iter(fields.values()))
    assert ours.experts.per_token == theirs.num_experts_per_tok


# What published files say beside what transformers writes: none of it is unknown.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "topk_method": "noaux_tc",
        "first_k_dense_replace": 1, "rope_scaling": None,
    },
    "mistral4": {
        "rope_interleave": True, "head_dim": 128, "qk_head_dim": 128, "first_k_dense_replace": 0,
    },
    "glm4_moe": {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "mixtral": {"sliding_window": None, "router_aux_loss_coef": 0.02},
    "phimoe": {
        "sliding_window": 512, "input_jitter_noise": 0.01, "hidden_dropout": 0.0, "auto_map": {"AutoConfig": "x.Y"},
        "original_max_position_embeddings": 256, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.2,
            "long_mscale": 1.2, "original_max_position_embeddings": 256,
        },
    },
    "qwen2_moe": {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "mlp_only_layers": []},
    "minimax_m2": {
        "attn_type_list": [1] * 8, "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "rotary_dim": 64, "mlp_intermediate_size": 8192,
        "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "auto_map": {"AutoConfig": "x.Y"},
    },
    "olmoe": {"clip_qkv": None, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
    "ernie4_5_moe": {
        "moe_capacity": [64] * 3, "moe_gate": "topk", "moe_use_aux_free": True, "auto_map": {"AutoConfig": "x.Y"},
        "moe_layer_start_index": 1, "moe_layer_end_index": 7, "use_bias": False,
    },
    "hy_v3": {
        "expert_hidden_dim": 1536, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "qk_norm": True,
        "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
        "enable_lm_head_fp32": True, "enable_attention_fp32_softmax": False, "enable_moe_fp32_combine": False,
        "num_nextn_predict_layers": 1, "use_grouped_mm": False, "eod_token_id": 3, "sep_token_id": 4,
    },
    "solar_open": {
        "first_k_dense_replace": 0, "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    },
    "dots1": {"scoring_func": "noaux_tc", "moe_layer_freq": 1, "pretraining_tp": 1, "use_sliding_window": False},
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_the_fields_of_published_files_are_known(model_type, read):
    assert read(model_type, **PUBLISHED[model_type]).unknown_options == ()


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm4_moe_lite", {"topk_method": "greedy"}, "topk_method"),
        ("glm4_moe_lite", {"mlp_layer_types": [DENSE]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types"),
        ("glm4_moe_lite", {"n_group": 5}, "n_group"),
        ("glm4_moe_lite", {"head_dim": 32}, "head_dim"),
        ("mistral4", {"n_group": 3}, "n_group"),
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ("mistral4", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"n_group": 128}, "n_group"),
        ("glm4_moe", {"topk_group": 2}, "topk_group"),
        ("glm4_moe", {"n_group": 8, "topk_group": 1, "num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
        ("glm4_moe", {"partial_rotary_factor": 2}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0.05}, "partial_rotary_factor"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral", {"sliding_window": 0}, "sliding_window"),
        ("mixtral", {"layer_types": [FULL, SLIDING] * 4, "sliding_window": 4}, "layer_types"),
        ("mixtral", {"num_local_experts": 2**17}, "experts"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("phimoe", {"num_local_experts": 1, "num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise"),
        ("phimoe", {"lm_head_bias": True, "tie_word_embeddings": True}, "lm_head_bias"),
        ("phimoe", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "short_mscale"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts"),
        ("qwen2_moe", {"layer_types": [SLIDING] * 8}, "layer_types"),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": [SLIDING]}, "layer_types"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("minimax_m2", {"rotary_dim": 129}, "rotary_dim"),
        ("minimax_m2", {"rotary_dim": 1}, "partial_rotary_factor"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act"),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free"),
        ("ernie4_5_moe", {"moe_norm_min": "small"}, "moe_norm_min"),
        ("ernie4_5_moe", {"moe_num_shared_experts": -1}, "moe_num_shared_experts"),
        ("hy_v3", {"route_norm": False}, "route_norm"),
        ("hy_v3", {"qk_norm": False}, "qk_norm"),
        ("hy_v3", {"expert_hidden_dim": 768}, "expert_hidden_dim"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts"),
        ("hy_v3", {"mlp_layer_types": [SPARSE] * 9}, "mlp_layer_types"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("dots1", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func"),
        ("dots1", {"layer_types": [SLIDING] * 8, "sliding_window": None}, "layer_types"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


HOSTILE = [None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "x", [], [[]], {}, {"a": 1}, [None] * 8, [SPARSE] * 8]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_model(model_type, read, part):
    fields = {**GIVEN, **theirs_of(model_type, **FEW_EXPERTS).to_dict(), **PUBLISHED[model_type]}
    fields |= {name: 4 for name in ("num_experts", "num_local_experts") if name in fields}
    for name, value in tried(fields.keys() - {"model_type"}, HOSTILE, part):
        try:
            config = read(**{**fields, "model_type": model_type, name: value})
        except ModelError:
            continue
        assert len(models.describe(config).blocks) == config.num_layers
