"""GGUF files of DeepSeek V4 give the logits of the model they were made from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.transformer import SLIDING
from forebay.families.deepseek_v4.config import HASHED, HEAVY, SPARSE, CompressedConfig
from forebay.formats.stored_tensor import read_tensor
from tests.formats.gguf_files import quantized, write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_window import common_metadata, expert_metadata
from tests.models.tiny import Tiny, make_oracle, random_ids

# llama.cpp knows these numbers of tokens of an entry alone.
_RATES = {SPARSE: 4, HEAVY: 128}
_RATIOS = {SLIDING: 0, **_RATES}
_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **{f"hc_head.hc_{kind}": f"output_hc_{kind}.weight" for kind in ("fn", "base", "scale")},
}
_BLOCK_NAMES = {
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{
        f"ffn.{ours}.{matrix}.weight": f"ffn_{name}_{kind}.weight"
        for ours, kind in (("experts", "exps"), ("shared_experts", "shexp"))
        for matrix, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
    **{f"hc_{part}_{kind}": f"hc_{part}_{kind}.weight" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")},
}


@pytest.fixture(scope="module", params=["deepseek_v4", "deepseek_v4-yarn"])
def original(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return made("deepseek_v4", tmp_path_factory.mktemp("deepseek"))


def made(case: str, folder: Path) -> Tiny:
    """A model with entries of as many tokens as the format has, and no other limit of experts than is written."""
    oracle = make_oracle(case, compress_rates=_RATES)
    oracle.save_pretrained(folder)
    return Tiny(folder, oracle)


def stored_name(name: str) -> str:
    inner = name.removeprefix("model.")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", inner):
        return f"blk.{match[1]}.{_BLOCK_NAMES[match[2]]}"
    return _NAMES[inner]


def tensors_of(source: Path) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has them: tables of experts are int32, all else is as published."""
    stored = {
        stored_name(name): values for name, values in stacked_experts(load_file(source / "model.safetensors")).items()
    }
    return {name: values.astype(np.int32) if "tid2eid" in name else values for name, values in stored.items()}


def metadata_of(config: CompressedConfig) -> dict[str, Any]:
    return {
        **common_metadata(config),
        **expert_metadata(config),
        **yarn_of(config),
        "feed_forward_length": None,
        "rope.dimension_count": config.rope_dim,
        "attention.q_lora_rank": config.q_rank,
        "attention.output_lora_rank": config.output_rank,
        "attention.output_group_count": config.output_groups,
        "attention.compress_ratios": [*(_RATIOS[kind] for kind in config.layer_types), 0],
        "attention.compress_rope_freq_base": config.compress_rope[0],
        "attention.sliding_window": config.sliding_window,
        "attention.indexer.head_count": config.index.num_heads,
        "attention.indexer.key_length": config.index.head_dim,
        "attention.indexer.top_k": config.index.top_k,
        "expert_shared_count": 1,
        "expert_weights_scale": config.experts.scale,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": config.mlp_layer_types.count(HASHED),
        "hyper_connection.count": config.hyper.num_streams,
        "hyper_connection.sinkhorn_iterations": config.hyper.iterations,
        "hyper_connection.epsilon": config.hyper.eps,
        "nextn_predict_layers": 1,
        "swiglu_clamp_exp": [config.experts.limit] * config.num_layers,
        "swiglu_clamp_shexp": [config.experts.limit] * config.num_layers,
        "vocab_size": config.vocab_size,
    }


def yarn_of(config: CompressedConfig) -> dict[str, Any]:
    _, yarn = config.compress_rope
    if yarn is None:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": int(yarn["original_max_position_embeddings"]),
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }


def convert(source: Path, path: Path, more: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, CompressedConfig)
    kept = {key: value for key, value in {**metadata_of(config), **metadata}.items() if value is not None}
    return write_gguf(path, kept, {**tensors_of(source), **(more or {})}, architecture="deepseek4")


def test_converted_deepseek_v4_gives_the_logits_of_the_original(original, load, tmp_path):
    ids = random_ids(140, seed=8)  # one entry of 128 tokens
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf")), context=256).step([(1, ids)])
    original.assert_agrees(logits, ids)


def test_metadata_of_deepseek_v4_say_what_the_configuration_said(original, tmp_path):
    expected = open_checkpoint(original.path).config
    got = open_checkpoint(convert(original.path, tmp_path / "m.gguf")).config
    assert isinstance(got, CompressedConfig)
    assert isinstance(expected, CompressedConfig)
    assert got.compress_rope[0] == expected.compress_rope[0]
    assert got.hyper.eps == pytest.approx(expected.hyper.eps)
    same = {"compress_rope": (0.0, None), "rms_norm_eps": 0.0, "hyper": replace(expected.hyper, eps=0.0)}
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True, "packing": None, **same}
    assert replace(got, **not_said) == replace(expected, **not_said)
    assert got.unknown_options == ()


def test_blocks_of_deepseek_v4_that_draft_are_left_out(first, load, tmp_path):
    config = open_checkpoint(first.path).config
    drafts = {"nextn.e_proj": (48, 48), "nextn.enorm": (48,), "nextn.hc_head_fn": (2, 96), "attn_norm": (48,)}
    more = {f"blk.4.{name}.weight": np.ones(shape, np.float32) for name, shape in drafts.items()}
    limits = [config.experts.limit] * 5
    counts = {"block_count": 5, "swiglu_clamp_exp": limits, "swiglu_clamp_shexp": limits}
    ids = random_ids(20, seed=8)
    (logits,) = Driver(load(convert(first.path, tmp_path / "m.gguf", more, **counts))).step([(1, ids)])
    first.assert_agrees(logits, ids)


def test_experts_of_deepseek_v4_keep_the_codes_of_their_file(first, tmp_path):
    """As converters of the published files write them: MXFP4, all experts of a block in one tensor."""
    raw = quantized("MXFP4", (6 * 48, 96), seed=3)
    config = open_checkpoint(first.path).config
    assert isinstance(config, CompressedConfig)
    written = {key: value for key, value in metadata_of(config).items() if value is not None}
    tensors = {**tensors_of(first.path), "blk.2.ffn_down_exps.weight": raw.reshape(6, 48, -1)}
    sizes = {**written, "expert_feed_forward_length": 96}
    path = write_gguf(tmp_path / "m.gguf", sizes, tensors, architecture="deepseek4", type_name="MXFP4")
    tensor = open_checkpoint(path).tensors["model.layers.2.ffn.experts.5.w2.weight"]
    assert tensor.codes is not None
    expected = gguf.quants.dequantize(raw[5 * 48 :], gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(read_tensor(tensor), expected)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_gating_func": 2}, "gating function 2"),
        ({"expert_gating_func": None}, "gating function 'None'"),
        ({"swiglu_clamp_exp": [0.5, 0.5, 0.5, 0.7]}, "swiglu_clamp_exp"),
        ({"swiglu_clamp_exp": [0.5]}, "swiglu_clamp_exp has 1 entries for 4 layers"),
        ({"swiglu_clamp_exp": None, "swiglu_clamp_shexp": None}, "not one limit"),
        ({"swiglu_clamp_exp": [0.0] * 4, "swiglu_clamp_shexp": None}, "swiglu_limit"),
        ({"swiglu_clamp_shexp": [0.7] * 4}, "swiglu_clamp_shexp"),
        ({"swiglu_clamp_exp": ["x"] * 4}, "swiglu"),
        ({"attention.compress_ratios": [0, 4, 8, 4]}, "compress_ratios"),
        ({"attention.compress_ratios": [0, 4]}, "compress_ratios"),
        ({"attention.compress_ratios": 4}, "compress_ratios"),
        ({"attention.compress_ratios": [2.5] * 4}, "compress_ratios"),
        ({"expert_weights_norm": False}, "norm_topk_prob"),
        ({"expert_shared_count": 2}, "n_shared_experts"),
        ({"attention.output_group_count": 3}, "o_groups"),
        ({"rope.dimension_count": 18}, "qk_rope_head_dim"),
        ({"hyper_connection.count": 0}, "hc_mult"),
        ({"block_count": 1 << 20}, "block_count"),
    ],
)
def test_hostile_metadata_of_deepseek_v4_are_named(metadata, named, first, tmp_path):
    with pytest.raises(ModelError, match=re.escape(named)):
        open_checkpoint(convert(first.path, tmp_path / "m.gguf", **metadata))


def test_a_table_of_deepseek_v4_with_an_expert_that_is_not_there_is_refused(first, load, tmp_path):
    more = {"blk.0.ffn_gate_tid2eid.weight": np.full((96, 2), 6, np.int32)}
    with pytest.raises(ModelError, match="tid2eid names experts"):
        load(convert(first.path, tmp_path / "m.gguf", more))
