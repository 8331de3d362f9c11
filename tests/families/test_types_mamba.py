"""config.json of models with Mamba mixers: what is read, what is assumed, what is refused."""

from __future__ import annotations

import json
import math
from operator import attrgetter
from typing import Any

import pytest
from transformers import AutoConfig

from forebay import models
from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig, config_from_folder, family
from tests.families import given

GIVEN = {**given.GIVEN, "num_hidden_layers": 4}

# The fields without which transformers' defaults for a type contradict GIVEN.
NEEDED: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 16, "head_dim": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}


EXPERTS = {"experts.num_experts": "num_experts", "experts.per_token": "num_experts_per_tok"}


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


BAMBA = {
    "mixer.num_heads": "mamba_n_heads",
    "mixer.head_dim": "mamba_d_head",
    "mixer.num_groups": "mamba_n_groups",
    "mixer.state_size": "mamba_d_state",
    "mixer.width": "mamba_d_conv",
    "mixer.conv_bias": "mamba_conv_bias",
    "mixer.bias": "mamba_proj_bias",
    "mixer.dt_limit": "time_step_limit",
}

MAMBA1 = {
    "mixer.intermediate_size": "intermediate_size",
    "mixer.state_size": "state_size",
    "mixer.width": "conv_kernel",
    "mixer.dt_rank": "time_step_rank",
    "mixer.conv_bias": "use_conv_bias",
    "mixer.bias": "use_bias",
}

# What we call a type's own fields, and what transformers' configuration does.
NAMES: dict[str, dict[str, str]] = {
    "falcon_h1": {
        **BAMBA,
        "mixer.out_bias": "projectors_bias",
        **same("mamba_rms_norm", "mamba_norm_before_gate", "ssm_multipliers", "mlp_multipliers"),
    },
    "granitemoehybrid": {
        **BAMBA,
        **EXPERTS,
        "experts.num_experts": "num_local_experts",
        **same("shared_intermediate_size"),
        "multipliers.embedding": "embedding_multiplier",
        "multipliers.attention": "attention_multiplier",
        "multipliers.residual": "residual_multiplier",
        "multipliers.logits": "logits_scaling",
    },
    "bamba": BAMBA,
    "jamba": {
        "mixer.dt_rank": "mamba_dt_rank",
        **EXPERTS,
        "mixer.state_size": "mamba_d_state",
        "mixer.width": "mamba_d_conv",
        "mixer.conv_bias": "mamba_conv_bias",
        "mixer.bias": "mamba_proj_bias",
    },
    "zamba2": {
        "mixer.num_heads": "n_mamba_heads",
        "mixer.head_dim": "mamba_headdim",
        "mixer.num_groups": "mamba_ngroups",
        "mixer.state_size": "mamba_d_state",
        "mixer.width": "mamba_d_conv",
        "num_shared": "num_mem_blocks",
        "has_rope": "use_mem_rope",
        "adapter_rank": "adapter_rank",
    },
    "mamba": MAMBA1,
    "falcon_mamba": {**MAMBA1, **same("mixer_rms_eps")},
    "mamba2": {
        "mixer.num_heads": "num_heads",
        "mixer.head_dim": "head_dim",
        "mixer.num_groups": "n_groups",
        "mixer.state_size": "state_size",
        "mixer.width": "conv_kernel",
        "mixer.conv_bias": "use_conv_bias",
        "mixer.bias": "use_bias",
        "mixer.dt_limit": "time_step_limit",
    },
    "nemotron_h": {
        "mixer.num_heads": "mamba_num_heads",
        "mixer.head_dim": "mamba_head_dim",
        "mixer.num_groups": "n_groups",
        "mixer.state_size": "ssm_state_size",
        "mixer.width": "conv_kernel",
        "mixer.conv_bias": "use_conv_bias",
        "mixer.bias": "use_bias",
        "experts.num_experts": "n_routed_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.intermediate_size": "moe_intermediate_size",
        "experts.shared_size": "moe_shared_expert_intermediate_size",
        "experts.scale": "routed_scaling_factor",
        "experts.normalize": "norm_topk_prob",
    },
}
TYPES = tuple(NAMES)
EPSILON = dict.fromkeys(["nemotron_h", "mamba", "mamba2", "falcon_mamba"], "layer_norm_epsilon")


@pytest.fixture
def read(tmp_path):
    def from_fields(**fields: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return config_from_folder(tmp_path)

    return from_fields


def given(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **GIVEN, **NEEDED.get(model_type, {})}


@pytest.mark.parametrize("model_type", TYPES)
def test_silence_means_what_it_means_to_transformers(model_type, read):
    ours, theirs = read(**given(model_type)), AutoConfig.for_model(**given(model_type))
    for path, name in NAMES[model_type].items():
        expected = getattr(theirs, name)
        assert attrgetter(path)(ours) == (tuple(expected) if isinstance(expected, list) else expected), name
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == getattr(theirs, EPSILON.get(model_type, "rms_norm_eps"))
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.layer_types == tuple(theirs.layer_types)


@pytest.mark.parametrize(
    "limit",
    [[0.0, {"__float__": "Infinity"}], [0.0, math.inf], [0, math.inf], None],
    ids=["5.x", "json", "int", "null"],
)
def test_no_limit_of_the_step_width_is_read_in_every_spelling(limit, read):
    assert read(**given("falcon_h1"), time_step_limit=limit).mixer.dt_limit == (0.0, math.inf)


def test_a_pattern_of_letters_means_the_same_layers_as_a_list(read):
    types = ["mamba", "mlp", "attention", "moe"]
    expected = ("linear_attention", "mlp", "full_attention", "moe")
    assert read(**given("nemotron_h"), hybrid_override_pattern="M-*E").layer_types == expected
    assert read(**given("nemotron_h"), layers_block_type=types).layer_types == expected


@pytest.mark.parametrize("model_type", ["nemotron_h", "jamba"])
def test_code_of_a_files_own_is_passed_over_where_transformers_has_the_type(model_type, read):
    assert read(**given(model_type), auto_map={"AutoModel": "modeling.py"}) == read(**given(model_type))


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("falcon_h1", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("falcon_h1", {"mamba_d_head": 7}, "mamba_d_head"),
        ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("falcon_h1", {"mamba_d_conv": 1}, "mamba_d_conv"),
        ("falcon_h1", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ("falcon_h1", {"time_step_limit": 0.5}, "time_step_limit"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ("falcon_h1", {"key_multiplier": "1"}, "key_multiplier"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"n_group": 3}, "n_group"),
        ("nemotron_h", {"n_group": 8}, "n_group"),
        ("nemotron_h", {"topk_group": 2}, "topk_group"),
        ("nemotron_h", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("nemotron_h", {"n_groups": 3}, "n_groups"),
        ("bamba", {"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("bamba", {"head_dim": 18}, "head_dim"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
        ("jamba", {"expert_layer_period": 1}, "expert_layer_offset"),
        ("zamba2", {"hidden_act": "silu"}, "hidden_act"),
        ("zamba2", {"use_long_context": True}, "use_long_context"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("zamba2", {"num_hidden_layers": 3}, "num_hidden_layers"),
        ("zamba2", {"use_shared_attention_adapter": True}, "use_shared_attention_adapter"),
        ("mamba2", {"num_heads": 3}, "num_heads"),
        ("mamba2", {"n_groups": 3}, "n_groups"),
        ("mamba", {"conv_kernel": 9}, "conv_kernel"),
        ("mamba", {"time_step_rank": "large"}, "time_step_rank"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types"),
        ("granitemoehybrid", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling"),
        ("granitemoehybrid", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(**{**given(model_type), **fields})


HOSTILE = [None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "x", [], [[]], {}, {"a": 1}, [None] * 4, ["mamba"] * 3]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
def test_any_value_in_any_field_is_refused_or_gives_a_model(model_type, read):
    fields = AutoConfig.for_model(**given(model_type)).to_dict()
    for name in fields:
        for value in HOSTILE:
            try:
                config = read(**{**fields, name: value})
            except ModelError:
                continue
            assert models.describe(config).max_positions == config.max_position_embeddings


@pytest.mark.parametrize(
    ("model_type", "stored", "name"),
    [
        ("nemotron_h", "model.layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight", ""),
        ("mamba", "backbone.embedding.weight", "backbone.embeddings.weight"),
        ("mamba2", "backbone.embeddings.weight", "backbone.embeddings.weight"),
        (
            "granitemoehybrid",
            "model.layers.0.block_sparse_moe.input_linear.weight",
            "model.layers.0.block_sparse_moe.experts.gate_up_proj",
        ),
        (
            "granitemoehybrid",
            "model.layers.0.shared_mlp.input_linear.weight",
            "model.layers.0.shared_mlp.input_linear.weight",
        ),
    ],
)
def test_tensors_have_one_name_here(model_type, stored, name):
    assert family(model_type).names.here(stored, 4) == name
