"""GGUF files of GLM-5.3-Flash give the logits of the model they were made from."""

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
from forebay.families.config.transformer import FULL
from forebay.families.glm5_next_text.config import PooledConfig
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_delta import decays, latent_metadata, latent_tensors, round_scale
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import Tiny, make_oracle, random_ids

# The format has as many heads of delta rules as of attention.
_HEADS = {"linear_num_heads": 4}
_OTHER = "glm5_next_text-shared-softplus"
_OWN = {
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    **{f"hc_{part}_{kind}": f"hc_{part}_{kind}.weight" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")},
}


@pytest.fixture(scope="module", params=["glm5_next_text", _OTHER])
def original(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return made("glm5_next_text", tmp_path_factory.mktemp("glm"))


def made(case: str, folder: Path) -> Tiny:
    oracle = make_oracle(case, **_HEADS)
    oracle.save_pretrained(folder)
    return Tiny(folder, oracle)


def tensors_of(source: Path, config: PooledConfig) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has them, with Kimi Linear's names from the gguf package's own table for most."""
    names, stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, config.num_layers), {}
    for name, values in stacked_experts(load_file(source / "model.safetensors")).items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer and layer[2] in _OWN:
            stored[f"blk.{layer[1]}.{_OWN[layer[2]]}"] = values
            continue
        kernel = values.reshape(1, len(values), 1, -1) if "conv1d" in name else values
        for new, changed in latent_tensors(*decays(name, kernel), config):
            stored[names.get_name(new, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(changed)
    return stored


def metadata_of(config: PooledConfig) -> dict[str, Any]:
    bound = {"kda.gate_lower_bound": config.delta.lower_bound} if config.delta.lower_bound else {}
    return {
        **common_metadata(config),
        **latent_metadata(config),
        **bound,
        "attention.head_count_kv": [int(kind == FULL) for kind in config.layer_types],
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.head_count": config.index.num_heads,
        "attention.indexer.key_length": config.index.head_dim,
        "attention.indexer.top_k": config.index.top_k,
        "attention.indexer.kpool": config.index.pool,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "expert_group_count": config.experts.groups,
        "expert_group_used_count": config.experts.best_groups,
        "expert_weights_norm": config.experts.normalize,
        "hyper_connection.count": config.hyper.num_streams,
        "hyper_connection.sinkhorn_iterations": config.hyper.iterations,
        "hyper_connection.epsilon": config.hyper.eps,
        "kda.head_dim": config.delta.head_dim,
        "ssm.conv_kernel": config.delta.width,
        "swiglu_clamp_exp": [config.limit] * config.num_layers,
        "swiglu_clamp_shexp": [config.limit] * config.num_layers,
    }


def convert(source: Path, path: Path, more: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, PooledConfig)
    kept = {key: value for key, value in {**metadata_of(config), **metadata}.items() if value is not None}
    return write_gguf(path, kept, {**tensors_of(source, config), **(more or {})}, architecture="glm5-next")


def test_converted_glm5_next_gives_the_logits_of_the_original(original, load, tmp_path):
    ids = random_ids(40, seed=8)
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf"))).step([(1, ids)])
    original.assert_agrees(logits, ids)


def test_metadata_of_glm5_next_say_what_the_configuration_said(original, tmp_path):
    expected = open_checkpoint(original.path).config
    got = open_checkpoint(convert(original.path, tmp_path / "m.gguf")).config
    assert isinstance(got, PooledConfig)
    assert isinstance(expected, PooledConfig)
    assert got.experts is not None
    assert expected.experts is not None
    assert round_scale(got.experts) == round_scale(expected.experts)
    assert got.hyper.eps == pytest.approx(expected.hyper.eps)
    same = {"rms_norm_eps": 0.0, "experts": None, "hyper": replace(expected.hyper, eps=0.0)}
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True, **same}
    assert replace(got, **not_said) == replace(expected, **not_said)
    assert got.unknown_options == ()


def test_blocks_of_glm5_next_that_draft_are_left_out(first, load, tmp_path):
    config = open_checkpoint(first.path).config
    assert isinstance(config, PooledConfig)
    drafts = {"nextn.eh_proj": (48, 96), "nextn.enorm": (48,), "attn_norm": (48,), "attn_q_a": (20, 48)}
    more = {f"blk.4.{name}.weight": np.ones(shape, np.float32) for name, shape in drafts.items()}
    counts = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [0, 1, 1, 0, 1],
        "swiglu_clamp_exp": [config.limit] * 5,
        "swiglu_clamp_shexp": [config.limit] * 5,
    }
    ids = random_ids(20, seed=8)
    (logits,) = Driver(load(convert(first.path, tmp_path / "m.gguf", more, **counts))).step([(1, ids)])
    first.assert_agrees(logits, ids)


def test_indexers_of_glm5_next_are_in_all_layers_of_a_file_that_does_not_say(first, tmp_path):
    config = open_checkpoint(convert(first.path, tmp_path / "m.gguf", **{"attention.indexer.types": None})).config
    assert isinstance(config, PooledConfig)
    assert config.indexer_types == ("full",) * 4


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.layer_norm_epsilon": 1e-5}, "attention.layer_norm_epsilon"),
        ({"attention.layer_norm_epsilon": "x"}, "attention.layer_norm_epsilon"),
        ({"attention.indexer.kpool_select_tail": False}, "index_kpool_always_select_tail"),
        ({"attention.indexer.kpool_select_tail": None}, "index_kpool_always_select_tail"),
        ({"attention.indexer.kpool": 3}, "index_topk"),
        ({"attention.indexer.kpool": 1}, "index_kpool"),
        ({"attention.indexer.types": [True]}, "attention.indexer.types"),
        ({"attention.indexer.types": 1}, "attention.indexer.types"),
        ({"attention.indexer.types": [2] * 4}, "attention.indexer.types"),
        ({"rope.dimension_count": 4, "attention.key_length": 20}, "qk_rope_head_dim"),
        ({"rope.dimension_count": None}, "rope.dimension_count"),
        ({"leading_dense_block_count": 5}, "leading_dense_block_count"),
        ({"kda.gate_lower_bound": 1.0}, "linear_lower_bound"),
        ({"expert_gating_func": 1}, "gating function 1"),
        ({"swiglu_clamp_exp": None, "swiglu_clamp_shexp": None}, "swiglu_clamp_exp"),
        ({"swiglu_clamp_shexp": [0.7] * 4}, "swiglu_clamp_shexp"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"block_count": 1 << 20}, "block_count"),
    ],
)
def test_hostile_metadata_of_glm5_next_are_named(metadata, named, first, tmp_path):
    with pytest.raises(ModelError, match=re.escape(named)):
        open_checkpoint(convert(first.path, tmp_path / "m.gguf", **metadata))
