"""config.json of Ministral 3 and Mellum: what is read, what is assumed, what is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from tests.families.given import GIVEN, HOSTILE, IN_PARTS, tried

FULL, SLIDING = "full_attention", "sliding_attention"

# Where a type's own values are here, and what transformers calls them.
NAMES: dict[str, dict[str, str]] = {
    "ministral3": {},
    "mellum": {"norm_topk_prob": "norm_topk_prob", "experts.per_token": "num_experts_per_tok"},
}
TYPES = tuple(NAMES)

# The fields that a type cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "ministral3": {},
    "mellum": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 48},
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_transformers(model_type, read):
    theirs = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type])
    ours = read(model_type)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == theirs.head_dim
    assert ours.sliding_window == (theirs.sliding_window or 0)
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.layer_types == tuple(getattr(theirs, "layer_types", [FULL] * 8))
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get(FULL, rope)["rope_theta"]
    for path, name in NAMES[model_type].items():
        assert attrgetter(path)(ours) == getattr(theirs, name), name


def test_ministral3_scales_queries_as_transformers_does_by_default(read):
    theirs, ours = AutoConfig.for_model("ministral3", **GIVEN).rope_parameters, read("ministral3")
    assert ours.query_scale == (
        theirs["llama_4_scaling_beta"],
        theirs["original_max_position_embeddings"],
    )
    shared = ours.rope_scaling.keys() & theirs.keys()
    assert {"factor", "beta_fast", "mscale", "mscale_all_dim"} <= shared
    assert {name: ours.rope_scaling[name] for name in shared} == {name: theirs[name] for name in shared}


@pytest.mark.parametrize("beta", [0, None])
def test_ministral3_without_a_scale_needs_no_length(beta, read):
    config = read("ministral3", rope_parameters={"rope_theta": 5e3, "llama_4_scaling_beta": beta})
    assert (config.query_scale, config.rope_scaling) == ((0.0, 0), None)


@pytest.mark.parametrize("given", [{}, {"mtp_layer_types": None}, {"mtp_layer_types": [], "mtp_mlp_layer_types": []}])
def test_draft_head_of_mellum_has_a_window_and_experts_where_the_file_is_silent(given, read):
    assert read("mellum", **given).draft_layer == (SLIDING, "sparse")
    assert read("mellum", mtp_layer_types=[FULL], mtp_mlp_layer_types=["dense"]).draft_layer == (FULL, "dense")


def test_mellum_has_a_rope_for_each_kind_of_attention(read):
    theirs, ours = AutoConfig.for_model("mellum", **GIVEN, **NEEDED["mellum"]).rope_parameters, read("mellum").ropes
    assert {kind: theta for kind, (theta, _) in ours.items()} == {k: rope["rope_theta"] for k, rope in theirs.items()}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "original_max"),
        (
            "ministral3",
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 16.5, "llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings",
        ),
        ("ministral3", {"layer_types": [SLIDING] * 8, "sliding_window": None}, "layer_types"),
        ("mellum", {"rope_theta": 1e4}, "rope_theta"),
        ("mellum", {"rope_parameters": {FULL: {}}}, "rope_parameters"),
        ("mellum", {"rope_parameters": {FULL: {"rope_type": "yarn"}, SLIDING: {}}}, "factor"),
        ("mellum", {"layer_types": [SLIDING]}, "layer_types"),
        ("mellum", {"layer_types": [SLIDING] * 8, "sliding_window": None}, "layer_types"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("mellum", {"mtp_layer_types": [FULL, FULL]}, "mtp_layer_types"),
        ("mellum", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("mellum", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ],
)
def test_what_is_not_honoured_is_refused(model_type, fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(model_type, **fields)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
@IN_PARTS
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(model_type, read, part):
    their_fields = AutoConfig.for_model(model_type, **GIVEN, **NEEDED[model_type]).to_dict()
    assert read(model_type).num_layers == 8
    for name, value in tried({*their_fields, "rope_theta", "rope_scaling"} - {"model_type"}, HOSTILE, part):
        try:
            config = read(model_type, **{name: value})
        except ModelError:
            continue
        assert len(config.layer_types) == config.num_layers > 0


def test_any_value_in_the_rope_of_ministral3_is_refused_or_gives_a_configuration(read):
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 512}
    for name in rope:
        for value in HOSTILE:
            try:
                config = read("ministral3", rope_parameters={**rope, name: value})
            except ModelError:
                continue
            assert config.query_scale.length > 0 or not config.query_scale.beta
