"""config.json: what is read, what is assumed, and what is refused instead of ignored."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families import TYPES
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import ModelConfig, config_from_folder

FULL = ["full_attention"] * 4


def llama_json(**overrides: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **overrides,
    }


@pytest.fixture
def read(tmp_path):
    def from_fields(generation: dict[str, Any] | None = None, **overrides: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(llama_json(**overrides)))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return config_from_folder(tmp_path)

    return from_fields


def test_silence_means_what_it_means_to_transformers(read):
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10_000.0, None, False)
    assert config.layer_types == ("full_attention",) * 4


# Those with a parser of their own have their defaults tested where that is.
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "qwen3_moe", "glm4", "phi3", "ernie4_5")


@pytest.mark.parametrize("model_type", PLAIN)
def test_defaults_are_those_of_transformers(model_type, read):
    from transformers import AutoConfig

    fields = {"num_experts": 4, "num_experts_per_tok": 2} if model_type == "qwen3_moe" else {}
    given = llama_json(model_type=model_type, num_key_value_heads=2, moe_intermediate_size=32, **fields)
    theirs = AutoConfig.for_model(**given)
    ours = read(**given)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or 0)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi_ropes_of_all_names_are_longropes_of_the_length_in_either_place(kind, read):
    rope = {"type": kind, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    own = {"original_max_position_embeddings": 64}
    fields = {
        "model_type": "phi3",
        "sliding_window": 2048,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 2048,
    }
    outside = read(**fields, rope_scaling=rope, **own, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False)
    assert outside == read(**fields, rope_scaling={**rope, **own})
    amplitude = math.sqrt(1 + math.log(32) / math.log(64))
    expected = {**own, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    expected |= {"rope_type": "longrope", "short_mscale": amplitude, "long_mscale": amplitude}
    assert outside.rope_scaling == expected
    assert (outside.rotary_dim, outside.sliding_window, outside.unknown_options) == (12, 0, ())
    assert read(**fields, rope_scaling=rope).rope_scaling["original_max_position_embeddings"] == 4096


def test_a_null_flag_is_off_whatever_the_default(read):
    """As to transformers, where it may be null at all."""
    latent = {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, "n_routed_experts": 4}
    few = {**latent, "num_experts_per_tok": 2}
    config, off = read(**few), read(**few, norm_topk_prob=None, rope_interleave=None)
    assert (config.experts.normalize, config.latent.interleaved) == (True, True)
    assert (off.experts.normalize, off.latent.interleaved) == (False, False)


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({}, ()),
        ({"use_cache": True, "torch_dtype": "float16", "temperature": 0.5, "initializer_range": 1}, ()),
        ({"is_causal": True, "pretraining_tp": 1, "logits_scaling": 1.0}, ()),
        ({"warp_factor": 9, "alibi": None, "parallel_residual": True}, ("parallel_residual", "warp_factor")),
        ({"sliding_window": 8}, ("sliding_window",)),  # a llama has none
        ({"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 8, "max_window_layers": 2}, ()),
    ],
    ids=str,
)
def test_what_nobody_asked_for_is_named_unless_it_is_known_to_be_harmless(fields, unknown, read):
    assert read(**fields).unknown_options == unknown


def test_no_window_and_a_window_of_null_are_different_things(read):
    assert read(model_type="mistral", num_key_value_heads=2).sliding_window == 4096
    assert read(model_type="mistral", num_key_value_heads=2, sliding_window=None).sliding_window == 0
    assert read(model_type="qwen2", num_key_value_heads=2, use_sliding_window=True).sliding_window == 4096


def test_end_tokens_of_both_files_count(read):
    config = read(generation={"eos_token_id": [7, 8, 2]}, eos_token_id=2, bos_token_id=1)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7, 8))


@pytest.mark.parametrize("ids", [100, -1, [1, 100], "2", 2.0, True, [[1]], list(range(80))])
def test_end_tokens_outside_the_vocabulary_are_refused(ids, read):
    with pytest.raises(ModelError, match="eos_token_id"):
        read(eos_token_id=ids)


def test_rope_parameters_of_both_generations_are_read(read):
    scaling = {"factor": 2.0}
    assert read(rope_theta=5e5, rope_scaling={"type": "linear", **scaling}).rope_theta == 5e5
    new = read(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, **scaling})
    assert (new.rope_theta, new.rope_scaling) == (5e5, {"rope_type": "linear", "factor": 2.0})
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "linear", **scaling})
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": ["x"]}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}, "short_factor"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 1,
            },
            "above 1",
        ),
        ({"rope_type": ["linear"]}, "linear"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "surprise": 1}, "surprise"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor"),
        (7, "not an object"),
    ],
)
def test_rope_parameters_that_are_not_honoured_are_refused(rope, message, read):
    with pytest.raises(ModelError, match=message):
        read(rope_parameters=rope)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "../llama"}, "model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling.py"}}, "remote code"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_mscale": 1.0}}, "short_mscale"),
        ({"model_type": "phi3", "lm_head_bias": True}, "lm_head_bias"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"pretraining_tp": True}, "pretraining_tp"),
        ({"is_causal": False}, "is_causal"),
        ({"is_causal": None}, "is_causal"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"rescale_prenorm_residual": True}, "rescale_prenorm_residual"),
        ({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 0}, "sliding_window"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "divisor"),
        ({"head_dim": 15}, "even"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 4, "layer_types": FULL}, "layer_types"),
        ({"model_type": "qwen3", "num_key_value_heads": 4, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2"}, "num_key_value_heads is missing"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(fields, message, read):
    with pytest.raises(ModelError, match=message):
        read(**fields)


HOSTILE = [None, True, -1, 0, 3, 2**70, 1.5, float("nan"), float("inf"), "x", "", [], [[]], {}, {"a": 1}, [None] * 4]


@pytest.mark.quick(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(model_type, read):
    fields = llama_json(
        model_type=model_type,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=8,
        no_rope_layers=[1, 1, 1, 0],
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    )
    optional = [
        "head_dim",
        "layer_types",
        "mlp_only_layers",
        "rms_norm_eps",
        "rope_scaling",
        "eos_token_id",
        "auto_map",
    ]
    for name in [*fields, *optional]:
        for value in HOSTILE:
            try:
                config = read(**{**fields, name: value})
            except ModelError:
                continue
            assert config.num_layers > 0
            assert len(config.layer_types) == config.num_layers


def test_fields_know_what_nobody_asked_for():
    raw = {"old": 1, "new": 2, "inner": {"a": 1, "b": 2}, "kept": 3, "gone": 4, "null": None}
    fields = Fields.of_file(raw, "there")
    renamed = fields.renamed({"old": "new"})
    assert fields.unread == raw.keys() - {"null"}
    assert renamed.size("new") == 1
    assert fields.replaced(kept=5).size("kept") == 5  # not the file's
    assert fields.within("inner").size("a") == 1
    assert fields.without("gone").get("gone") is None
    assert fields.unread == {"inner.b", "kept", "gone"}
    fields.dropped("gone")
    assert fields.size("kept") == 3
    assert fields.unread == {"inner.b"}
