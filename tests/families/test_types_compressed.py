"""config.json of DeepSeek-V4: what is read, what is assumed, what is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of
from forebay.families.config.transformer import FULL, LINEAR, SLIDING
from forebay.families.deepseek_v4.config import HASHED, HEAVY, ROUTED, SPARSE, CompressedConfig
from forebay.families.glm5_next_text.config import PooledConfig
from forebay.families.qwen4_exp_text.config import Qwen4Config
from tests.cli.public_configs import DEEPSEEK_V4_FLASH
from tests.families.given import GIVEN


def parsed(**fields: Any) -> CompressedConfig:
    config = config_of({**DEEPSEEK_V4_FLASH, **fields})
    assert isinstance(config, CompressedConfig)
    return config


def test_published_fields_and_those_that_transformers_writes_are_read_alike() -> None:
    written = AutoConfig.for_model(**DEEPSEEK_V4_FLASH).to_dict()
    saved, published = config_of(written), parsed()
    for name in ("rates", "layer_types", "mlp_layer_types", "rope_dim", "compress_rope", "index", "hyper", "experts"):
        assert getattr(saved, name) == getattr(published, name), name
    assert list(published.layer_types) == written["layer_types"]
    assert list(published.mlp_layer_types) == written["mlp_layer_types"] == [HASHED] * 3 + [ROUTED] * 40
    assert published.page_multiple == 128
    theta, scaling = published.compress_rope
    assert (theta, published.rope_theta, published.rope_scaling) == (160_000, 10_000, None)
    assert scaling is not None
    assert scaling["attention_factor"] == 1.0, "YaRN's own amplitude is not used"


def test_older_fields_are_read() -> None:
    found = parsed(num_hidden_layers=4, compress_ratios=[0, 4, 128, 4, 0], num_hash_layers=1, compress_rate_hca=64)
    assert found.layer_types == (SLIDING, SPARSE, HEAVY, SPARSE)
    assert found.mlp_layer_types == (HASHED, ROUTED, ROUTED, ROUTED)
    assert found.rates == {SPARSE: 4, HEAVY: 64}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"compress_rates": {SPARSE: 1}}, SPARSE),
        ({"compress_rates": [4]}, "compress_rates"),
        ({"num_hidden_layers": 2, "compress_ratios": [4, 8]}, "compress_ratios"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"mlp_layer_types": [ROUTED]}, "mlp_layer_types"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({"rope_scaling": {"main": {}, "compress": {"rope_theta": 1.0}}, "qk_rope_head_dim": 512}, "rope_parameters"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"o_groups": 7}, "o_groups"),
        ({"hc_mult": 17}, "hc_mult"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"intermediate_size": 99}, "intermediate_size"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parsed(**fields)


POOLED = {
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "head_dim": "head_dim",
    "mlp_layer_types": "mlp_layer_types",
    "indexer_types": "indexer_types",
    "latent.rank": "kv_lora_rank",
    "latent.q_rank": "q_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value_dim": "v_head_dim",
    "experts.num_experts": "n_routed_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.groups": "n_group",
    "experts.best_groups": "topk_group",
    "experts.normalize": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
    "delta.num_heads": "linear_num_heads",
    "delta.head_dim": "linear_head_dim",
    "delta.width": "linear_conv_kernel_dim",
    "index.num_heads": "index_n_heads",
    "index.head_dim": "index_head_dim",
    "index.top_k": "index_topk",
    "index.pool": "index_kpool",
    "hyper.num_streams": "hc_mult",
    "hyper.iterations": "hc_sinkhorn_iters",
    "hyper.eps": "hc_eps",
    "limit": "swiglu_limit",
}


def pooled(**fields: Any) -> PooledConfig:
    config = config_of({**GIVEN, "model_type": "glm5_next_text", **fields})
    assert isinstance(config, PooledConfig)
    return config


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"linear_attn_config": {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}},
        {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
        {"linear_attn_config": {"gate_lower_bound": None}},
        {"linear_lower_bound": None},
        {"layer_types": [LINEAR, FULL] * 4, "index_topk_pattern": "FF" * 4},
        {"layer_types": [LINEAR, "indexed_attention"] * 4, "num_hidden_layers": 8},
        {"layer_types": [LINEAR, "deepseek_sparse_attention"] * 4},
        {"num_hidden_layers": 2},
    ],
    ids=str,
)
def test_silence_of_glm5_next_means_what_it_means_to_transformers(fields: dict[str, Any]) -> None:
    given = {"num_key_value_heads": 4, **fields}
    ours, theirs = pooled(**given), AutoConfig.for_model("glm5_next_text", **{**GIVEN, **given})
    for path, name in POOLED.items():
        expected = getattr(theirs, name)
        assert attrgetter(path)(ours) == (tuple(expected) if isinstance(expected, list) else expected), name
    assert [{FULL: "indexed_attention"}.get(kind, kind) for kind in ours.layer_types] == theirs.layer_types
    assert ours.delta.lower_bound == (theirs.linear_lower_bound or 0)
    assert (ours.page_multiple, ours.sparse_top_k) == (16, 2048 + 15)


def test_fields_of_the_published_glm5_next_are_all_known() -> None:
    """Those that say the same as others, and those of the layer that drafts."""
    lists = {"kda_layers": [0, 1], "full_attn_layers": [2]}
    more = {"mhc": True, "mla_use_nope": True, "index_kpool_compress": True, "moe_router_dtype": "float32"}
    config = pooled(**more, index_share_for_mtp_iteration=True, linear_attn_config={"gate_lower_bound": -5.0, **lists})
    assert config.unknown_options == ()
    assert config.delta == pooled().delta
    with pytest.raises(ModelError, match="mla_use_nope is False"):
        pooled(mla_use_nope=False)


def test_what_transformers_writes_of_glm5_next_is_read_as_what_it_read() -> None:
    given = {"num_key_value_heads": 4, "index_kpool": 8, "linear_attn_config": {"head_dim": 32}}
    theirs = AutoConfig.for_model("glm5_next_text", **{**GIVEN, **given})
    assert config_of(theirs.to_dict()) == pooled(**given)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_kpool": 1}, "index_kpool"),
        ({"index_kpool": 3}, "index_topk"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"index_head_dim": 0}, "index_head_dim"),
        ({"indexer_types": ["full"] * 3 + ["shared"] + ["full"] * 4}, "indexer_types"),
        ({"layer_types": [FULL] * 8, "indexer_types": ["full", "shared", "shared"] + ["full"] * 5}, "indexer_types"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"hc_mult": 17}, "hc_mult"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_a_wrong_field_of_glm5_next_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        pooled(**fields)


GATED = {
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "norm_topk_prob": "norm_topk_prob",
    "experts.num_experts": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "delta.num_key_heads": "linear_num_key_heads",
    "delta.num_value_heads": "linear_num_value_heads",
    "delta.key_head_dim": "linear_key_head_dim",
    "delta.value_head_dim": "linear_value_head_dim",
    "delta.width": "linear_conv_kernel_dim",
    "index.num_heads": "indexer_n_heads",
    "index.head_dim": "indexer_head_dim",
    "index.top_k": "indexer_budget",
    "index.pool": "indexer_compress_ratio",
    "streams.number": "hc_count",
    "streams.rank": "hc_lowrank",
}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 8,
}
TABLES = {"ple_layer_ids": [1, 3], "eos_token_id": [5, 6], "ngram_vocab_size_base": 300, "heads_per_ngram": 4}


def gated(**fields: Any) -> Qwen4Config:
    config = config_of({**GIVEN, **INDEXER, "model_type": "qwen4_exp_text", **fields})
    assert isinstance(config, Qwen4Config)
    return config


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": [LINEAR, FULL] * 4, "head_dim": 64, "norm_topk_prob": False},
        {"layer_types": [LINEAR, "indexed_attention"] * 4, "hc_count": 3},
        {"layer_types": [LINEAR, "qwen_sparse_attention"] * 4},
        {"full_attention_interval": 2, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ],
    ids=str,
)
def test_qwen4_silent_fields_have_the_defaults_of_transformers(fields: dict[str, Any]) -> None:
    ours, theirs = gated(**fields), AutoConfig.for_model("qwen4_exp_text", **{**GIVEN, **INDEXER, **fields})
    for path, name in GATED.items():
        assert attrgetter(path)(ours) == getattr(theirs, name), name
    assert [{FULL: "indexed_attention"}.get(kind, kind) for kind in ours.layer_types] == theirs.layer_types
    rope = theirs.rope_parameters
    assert ours.rotary_dim == ours.head_dim * rope.get("partial_rotary_factor", 1.0)
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.page_multiple, ours.sparse_top_k, ours.sigmoid_gate) == (8, 64 + 7, False)


def test_qwen4_fields_that_transformers_writes_are_read_as_those_that_it_read() -> None:
    given = {"hc_count": 3, "output_gate_type": "sigmoid", "layer_types": [LINEAR, FULL] * 4}
    theirs = AutoConfig.for_model("qwen4_exp_text", **{**GIVEN, **INDEXER, **given})
    assert config_of(theirs.to_dict()) == gated(**given)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"indexer_n_heads": None}, "indexer_n_heads"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 128}, "indexer_head_dim"),  # less than the rotated part
        ({"indexer_budget": 60}, "indexer_budget"),
        ({"indexer_compress_ratio": 1}, "indexer_compress_ratio"),
        ({"hc_count": 1}, "hc_count"),
        ({"hc_count": 17}, "hc_count"),
        ({"hc_lowrank": 0}, "hc_lowrank"),
        ({"output_gate_type": "tanh"}, "output_gate_type"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"layer_types": [LINEAR]}, "layer_types"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"linear_num_value_heads": 31}, "linear_num_value_heads"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok"),
        ({**TABLES, "ple_layer_ids": [0]}, "ple_layer_ids"),
        ({**TABLES, "ple_layer_ids": [9]}, "ple_layer_ids"),
        ({**TABLES, "ple_layer_ids": [4]}, "ple_layer_ids"),  # has attention
        ({**TABLES, "ple_embed_dim": 65}, "ple_embed_dim"),
        ({**TABLES, "ple_conv_kernel_size": 5}, "ple_conv_kernel_size"),
        ({**TABLES, "heads_per_ngram": 257}, "heads_per_ngram"),
        ({**TABLES, "ngram_size": 1}, "ngram_size"),
        ({**TABLES, "ngram_vocab_size_base": 1 << 27}, "ngram_vocab_size_base"),
        ({**TABLES, "split_ngram_parts": 0}, "split_ngram_parts"),
        ({**TABLES, "eos_token_id": None}, "eos_token_id"),
    ],
)
def test_qwen4_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        gated(**fields)


@pytest.mark.parametrize("fields", [{}, {"seed": 7, "ngram_size": 2, "ple_embed_dim": 64}], ids=str)
def test_qwen4_tables_are_those_of_transformers(fields: dict[str, Any]) -> None:
    given = {**GIVEN, **INDEXER, **TABLES, **fields}
    config, found = AutoConfig.for_model("qwen4_exp_text", **given), gated(**TABLES, **fields).ngrams
    assert found is not None
    for number, layer in enumerate(found.layers):
        with torch.device("meta"):
            table = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, layer, number)
        assert list(found.sizes[number]) == table.head_vocab_sizes
        assert (found.num_rows[number], found.size // len(found.sizes[number])) == table.ngram_embedding.weight.shape
        factors = modeling_qwen4_exp._build_layer_multipliers(config.vocab_size, found.longest, number, config.seed)
        assert list(found.multipliers[number]) == factors.tolist()
    assert (found.layers, found.end, found.num_parts) == ((0, 2), 5, 512)
