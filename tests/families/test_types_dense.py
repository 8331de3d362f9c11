"""config.json of dense models and their mixtures: what is read, what is assumed, what is refused."""

from __future__ import annotations

from operator import attrgetter

import pytest
from transformers import AutoConfig

from forebay import models
from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of
from forebay.families.exaone_moe.config import FAMILY as EXAONE_MOE
from tests.cli.public_decoders import PUBLISHED
from tests.families.given import GIVEN, HOSTILE, IN_PARTS, tried

FULL, SLIDING = "full_attention", "sliding_attention"

MULTIPLIERS = {
    "multipliers.embedding": "embedding_multiplier",
    "multipliers.attention": "attention_multiplier",
    "multipliers.residual": "residual_multiplier",
    "multipliers.logits": "logits_scaling",
}
GRANITE_MOE = {
    **MULTIPLIERS,
    "experts.num_experts": "num_local_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "intermediate_size",
}
# Where a type's own values are here, and what transformers calls them.
NAMES: dict[str, dict[str, str]] = {
    "olmo3": {},
    "granite": {**MULTIPLIERS, "mlp_bias": "mlp_bias"},
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": {**GRANITE_MOE, "shared_intermediate_size": "shared_intermediate_size"},
    "granite_swa": {**MULTIPLIERS, "mlp_bias": "mlp_bias", "rope_thetas": "layer_rope_theta"},
    "granitemoe_swa": {**GRANITE_MOE, "shared_intermediate_size": "shared_intermediate_size"},
    "gemma": {},
    "glm": {},
    "apertus": {},
    "exaone": {"mlp_bias": "mlp_bias"},
    "exaone4": {},
    "exaone_moe": {
        "experts.num_experts": "num_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.intermediate_size": "moe_intermediate_size",
        "experts.groups": "n_group",
        "experts.best_groups": "topk_group",
        "experts.normalize": "norm_topk_prob",
        "experts.scale": "routed_scaling_factor",
    },
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"experts.num_experts": "num_experts", "experts.per_token": "moe_topk"},
    "seed_oss": {"attention_out_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    "internlm3": {"mlp_bias": "mlp_bias"},
    "arcee": {"mlp_bias": "mlp_bias"},
}
TYPES = tuple(NAMES)


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_transformers(model_type, read):
    theirs = AutoConfig.for_model(model_type, **GIVEN)
    ours = read(model_type)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or 0)
    assert ours.layer_types == tuple(getattr(theirs, "layer_types", None) or [FULL] * 8)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get(FULL, rope)["rope_theta"]
    for path, name in NAMES[model_type].items():
        value = getattr(theirs, name)
        assert attrgetter(path)(ours) == (tuple(value) if isinstance(value, list) else value), name


@pytest.mark.parametrize("fields", [{}, {"rope_theta": 777.0}, {"rope_theta": 777.0, "rope_scaling": {"factor": 4.0}}])
def test_olmo3_scales_the_rope_of_full_attention_alone(fields, read):
    if "rope_scaling" in fields:
        fields["rope_scaling"] |= {"rope_type": "yarn", "original_max_position_embeddings": 128}
    theirs = AutoConfig.for_model("olmo3", **GIVEN, **fields).rope_parameters
    for kind, (theta, scaling) in read("olmo3", **fields).ropes.items():
        assert {"rope_type": "default", "rope_theta": theta, **(scaling or {})} == theirs[kind]


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, [True, True, True, False] * 2),
        ({"sliding_window_pattern": 2}, [True, False] * 4),
        ({"sliding_window_pattern": "LLLG", "layer_types": [FULL, SLIDING] * 4}, [False, True] * 4),
        ({"layer_types": [FULL] * 8}, [False] * 8),
        ({"sliding_window": None, "sliding_window_pattern": None}, [True] * 8),
        ({"sliding_window": None, "layer_types": [FULL] * 8}, [True] * 8),
    ],
)
@pytest.mark.parametrize("model_type", ["exaone4", "exaone_moe"])
def test_exaone_rotates_full_attention_only_where_there_is_no_window(model_type, fields, rotated, read):
    blocks = models.describe(read(model_type, **fields)).blocks
    assert [block.sublayers[0].part.rope is not None for block in blocks] == rotated


def test_exaone_moe_reads_published_names_and_those_of_transformers(read):
    published = read(
        "exaone_moe",
        first_last_k_dense_replace=1,
        is_moe_layer=[False] + [True] * 7,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    assert published == read("exaone_moe", mlp_layer_types=["dense"] + ["sparse"] * 7)
    assert published.unknown_options == ()
    for name in ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"):
        stored = EXAONE_MOE.names.here(f"model.layers.1.{name}", 8)
        assert stored == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert EXAONE_MOE.names.here("mtp.layers.0.mlp.gate.weight", 8) == ""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_no_option_that_is_unknown(name):
    assert config_of(PUBLISHED[name][0]).unknown_options == ()


def test_exaone_reads_published_fields_and_those_of_transformers(read):
    theirs = {"num_layers": 5, "layer_norm_epsilon": 0.25, "activation_function": "silu", "embed_dropout": 0.1}
    published = read("exaone", num_hidden_layers=None, auto_map={"AutoConfig": "x.C"}, **theirs)
    assert published == read("exaone", num_hidden_layers=5, rms_norm_eps=0.25, hidden_act="silu")
    assert published.unknown_options == ()


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_hunyuan_stretches_the_rope_s_base_by_alpha(where, model_type, read):
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale_all_dim": 0.0}
    stretched = read(model_type, head_dim=128, **{where: rope})
    assert stretched.rope_theta == pytest.approx(11_158_839.925)
    assert stretched.rope_scaling is None
    assert read(model_type, head_dim=128, rope_theta=5e3, **{where: rope}).rope_theta == stretched.rope_theta / 2
    plain = read(model_type, **{where: {"rope_type": "dynamic", "factor": 2.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (10_000.0, {"rope_type": "dynamic", "factor": 2.0})


def test_hunyuan_moe_reads_lists_of_the_same_number(read):
    expected = read("hunyuan_v1_moe", num_experts=4, moe_topk=2)
    listed = {
        "num_experts": [4] * 8,
        "moe_topk": [2] * 9,
        "moe_intermediate_size": [96] * 8,
        "num_shared_expert": [1] * 8,
    }
    assert read("hunyuan_v1_moe", **listed) == expected
    assert read("hunyuan_v1_moe", num_local_experts=4, num_experts_per_tok=2) == expected
    assert expected.unknown_options == ()


@pytest.mark.parametrize("model_type", ["seed_oss", "internlm3"])
def test_null_sizes_follow_from_others(model_type, read):
    theirs = AutoConfig.for_model(model_type, **{**GIVEN, "head_dim": None, "num_key_value_heads": None})
    ours = read(model_type, head_dim=None, num_key_value_heads=None)
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads) == (16, 4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("olmo3", {"sliding_window": None}, "sliding_window"),
        ("olmo3", {"layer_types": [SLIDING] * 7}, "layer_types"),
        ("olmo3", {"rope_parameters": YARN}, "rope_parameters"),
        ("olmo3", {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "su"}}}, "sliding_attention"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("granite", {"embedding_multiplier": "x"}, "embedding_multiplier"),
        ("granite", {"attention_multiplier": 1e300}, "attention_multiplier"),
        ("granite", {"residual_multiplier": True}, "residual_multiplier"),
        ("granitemoe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("granitemoe", {"num_local_experts": 0}, "num_local_experts"),
        ("granitemoe", {"num_local_experts": 1 << 24}, "at most 131072 experts"),
        ("granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size"),
        ("granite_swa", {"layer_rope_theta": [0] * 7}, "layer_rope_theta"),
        ("granite_swa", {"layer_rope_theta": [0] * 7 + [0.5]}, "layer_rope_theta"),
        ("granite_swa", {"layer_rope_theta": [0] * 7 + ["x"]}, "layer_rope_theta"),
        ("granite_swa", {"sliding_window": None}, "sliding_window"),
        ("granitemoe_swa", {"layer_rope_theta": 10_000.0}, "layer_rope_theta"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("glm", {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act"),
        ("apertus", {"qk_norm": False}, "qk_norm"),
        ("apertus", {"post_norm": True}, "post_norm"),
        ("apertus", {"mlp_bias": True}, "mlp_bias"),
        ("apertus", {"xielu": [[0.1, 0.2, 0.5, 0.0]] * 7}, "a list of 8"),
        ("apertus", {"xielu": [[0.1, 0.2, 0.5]] * 8}, "a list of 8"),
        ("apertus", {"xielu": [[0.1, 0.2, 0.5, 1e5]] * 8}, "a list of 8"),
        ("exaone", {"activation_function": "gelu"}, "hidden_act"),
        ("exaone4", {"sliding_window": None, "layer_types": [SLIDING] * 8}, "layer_types"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ("exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("exaone4", {"sliding_window": 0}, "sliding_window"),
        ("exaone_moe", {"n_group": 3}, "n_group"),
        ("exaone_moe", {"n_group": 4, "topk_group": 5}, "topk_group"),
        ("exaone_moe", {"num_experts": 4}, "num_experts_per_tok"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"] * 7}, "mlp_layer_types"),
        ("exaone_moe", {"is_moe_layer": [True] * 8}, "is_moe_layer"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("exaone_moe", {"topk_method": "greedy"}, "topk_method"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense", {"attention_head_dim": 32}, "attention_head_dim"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": "x"}}, "alpha"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e30}, "head_dim": 4}, "rope_theta"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 2.0}, "head_dim": 2}, "heads of 2"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "su": 1}}, "su"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 2.0}}, "alpha"),
        ("hunyuan_v1_moe", {"moe_topk": [1] * 7 + [2], "num_experts": 4}, "moe_topk"),
        ("hunyuan_v1_moe", {"moe_topk": [1] * 7}, "moe_topk"),
        ("hunyuan_v1_moe", {"moe_topk": 2}, "moe_topk"),
        ("hunyuan_v1_moe", {"moe_topk": 1, "num_experts_per_tok": 2, "num_experts": 4}, "num_experts_per_tok"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [95] * 8}, "moe_intermediate_size"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert"),
        ("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped"),
        ("hunyuan_v1_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias"),
        ("internlm3", {"qkv_bias": True}, "qkv_bias"),
        ("internlm3", {"bias": True}, "qkv_bias"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


OTHER_NAMES = (
    *("rope_theta", "rope_scaling", "is_moe_layer", "num_local_experts", "num_experts_per_tok", "bias", "qkv_bias"),
    *("moe_intermediate_size", "num_shared_expert", "partial_rotary_factor", "xielu"),
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(model_type, read, part):
    their_fields = AutoConfig.for_model(model_type, **GIVEN).to_dict()
    assert read(model_type).num_layers == 8
    for name, value in tried({*their_fields, *OTHER_NAMES} - {"model_type"}, HOSTILE, part):
        try:
            config = read(model_type, **{name: value})
        except ModelError:
            continue
        assert len(config.layer_types) == config.num_layers > 0
