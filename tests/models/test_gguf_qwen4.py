"""GGUF files of Qwen 4 give the logits of the model they were made from."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.transformer import FULL
from forebay.families.qwen4_exp_text.config import Qwen4Config
from tests.formats.gguf_files import quantized, write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_delta import qwen3_5_tensors, qwen_metadata
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import Tiny, make_oracle, random_ids

# What llama.cpp takes for granted: gates of delta rules, and at most one layer with n-grams.
_GATE = {"output_gate_type": "sigmoid"}
_TABLE = {"ple_layer_ids": [3], "ple_embed_dim": 128}
_TABLE_NAME = "per_layer_token_embd.weight"
_PARTS = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_NAMES = {f"model.hyper_connection_mixer.{ours}.weight": f"output_hc_{kind}.weight" for kind, ours in _PARTS.items()}
_BLOCK_NAMES = {
    **{
        f"{gates}_hyper_connection.{ours}.weight": f"hc_{part}_{kind}.weight"
        for gates, part in (("attn", "attn"), ("mlp", "ffn"))
        for kind, ours in {**_PARTS, "inject": "block_inject_weight"}.items()
    },
    **{f"self_attn.indexer.{part}_layernorm.weight": f"indexer.{part}_norm.weight" for part in "qk"},
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
    **{f"ple.norm_{part}.weight": f"ple_norm_{part}.weight" for part in ("key", "query", "conv")},
}


@pytest.fixture(scope="module", params=["qwen4_exp_text-ngrams", "qwen4_exp_text-whole-heads"])
def original(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return made("qwen4_exp_text-ngrams", tmp_path_factory.mktemp("qwen"))


def made(case: str, folder: Path) -> Tiny:
    own = _TABLE if case.endswith("-ngrams") else {"norm_topk_prob": True}
    oracle = make_oracle(case, **_GATE, **own)
    oracle.save_pretrained(folder)
    return Tiny(folder, oracle)


def tensors_of(source: Path, config: Qwen4Config) -> dict[str, np.ndarray]:
    """As llama.cpp's converter has them, with Qwen 3.5's names from the gguf package's own table for most."""
    names, stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, config.num_layers), {}
    parts: dict[int, np.ndarray] = {}
    for name, values in stacked_experts(load_file(source / "model.safetensors")).items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if ".ple_embedding." in name:
            if ".shard_" in name:
                parts[int(name.split("shard_")[1].split(".")[0])] = values
        elif name in _NAMES:
            stored[_NAMES[name]] = values + 1 if "norm" in name else values
        elif layer and layer[2] in _BLOCK_NAMES:
            changed = values + 1 if "norm" in layer[2] else values.squeeze(1) if "conv1d" in layer[2] else values
            stored[f"blk.{layer[1]}.{_BLOCK_NAMES[layer[2]]}"] = changed
        elif layer and layer[2] == "self_attn.indexer.index_qk_proj.weight":
            keys = config.index.num_heads * config.index.head_dim
            stored[f"blk.{layer[1]}.indexer.q_proj.weight"] = values[:keys]
            stored[f"blk.{layer[1]}.indexer.k_proj.weight"] = values[keys:]
        else:
            for new, changed in qwen3_5_tensors(name, values, config):
                stored[names.get_name(new, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(changed)
    table = {_TABLE_NAME: np.concatenate([parts[i] for i in sorted(parts)])} if parts else {}
    return {**stored, **table}


def metadata_of(config: Qwen4Config) -> dict[str, Any]:
    return {
        **common_metadata(config),
        **qwen_metadata(config),
        **ngram_metadata(config),
        "attention.compress_ratios": [config.index.pool * (kind == FULL) for kind in config.layer_types],
        "attention.indexer.head_count": config.index.num_heads,
        "attention.indexer.key_length": config.index.head_dim,
        "attention.indexer.top_k": config.index.top_k,
        "hyper_connection.count": config.streams.number,
        "hyper_connection.low_rank": config.streams.rank,
    }


def ngram_metadata(config: Qwen4Config) -> dict[str, Any]:
    ngrams = config.ngrams
    if ngrams is None:
        return {}
    (sizes,), (multipliers,) = ngrams.sizes, ngrams.multipliers
    return {
        "ple.layers": list(ngrams.layers),
        "ple.ngram_size": ngrams.longest,
        "ple.heads_per_ngram": ngrams.heads,
        "ple.conv_kernel": ngrams.width,
        "ple.eos_token_id": ngrams.end,
        "ple.layer_multipliers": np.array(multipliers, np.uint64),
        "ple.head_offsets": list(accumulate(sizes, initial=0))[:-1],
        "ple.head_vocab_sizes": np.array(sizes, np.uint64),
        "embedding_length_per_layer_input": ngrams.size // len(sizes),
    }


def convert(
    source: Path, path: Path, more: dict[str, np.ndarray] | None = None, type_name: str = "F32", **metadata: Any
) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, Qwen4Config)
    kept = {key: value for key, value in {**metadata_of(config), **metadata}.items() if value is not None}
    tensors = {**tensors_of(source, config), **(more or {})}
    return write_gguf(path, kept, tensors, architecture="qwen4exp", type_name=type_name)


def test_converted_qwen4_gives_the_logits_of_the_original(original, load, tmp_path):
    ids = random_ids(40, seed=8)
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf"))).step([(1, ids)])
    original.assert_agrees(logits, ids)


def test_metadata_of_qwen4_say_what_the_configuration_said(original, tmp_path):
    expected = open_checkpoint(original.path).config
    got = open_checkpoint(convert(original.path, tmp_path / "m.gguf")).config
    assert isinstance(got, Qwen4Config)
    assert isinstance(expected, Qwen4Config)
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert (got.ngrams is None) == (expected.ngrams is None)
    if got.ngrams is not None and expected.ngrams is not None:  # whose table has one part
        assert got.ngrams == replace(expected.ngrams, num_parts=1)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True, "rms_norm_eps": 0.0, "ngrams": None}
    assert replace(got, **not_said) == replace(expected, **not_said)
    assert got.unknown_options == ()


def test_tables_of_qwen4_are_read_by_row_in_the_type_of_their_file(first, load, tmp_path):
    """As published: IQ4_NL. The table stays in the file, and its rows have the values that this one gives them."""
    config, ids = open_checkpoint(first.path).config, random_ids(30, seed=8)
    assert isinstance(config, Qwen4Config)
    raw = quantized("IQ4_NL", (tensors_of(first.path, config)[_TABLE_NAME].shape[0], 32), seed=4)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.IQ4_NL)
    path = convert(first.path, tmp_path / "coded.gguf", {_TABLE_NAME: raw}, type_name="IQ4_NL")
    assert open_checkpoint(path).num_table_bytes == raw.nbytes
    (logits,) = Driver(load(path)).step([(1, ids)])
    (expected,) = Driver(load(convert(first.path, tmp_path / "plain.gguf", {_TABLE_NAME: values}))).step([(1, ids)])
    assert bool((logits == expected).all())


def test_tables_of_qwen4_in_a_type_that_is_not_read_by_row_are_refused(first, load, tmp_path):
    config = open_checkpoint(first.path).config
    assert isinstance(config, Qwen4Config)
    raw = quantized("MXFP4", (tensors_of(first.path, config)[_TABLE_NAME].shape[0], 32), seed=4)
    with pytest.raises(ModelError, match="MXFP4, whose rows cannot be read alone"):
        load(convert(first.path, tmp_path / "m.gguf", {_TABLE_NAME: raw}, type_name="MXFP4"))


def test_blocks_of_qwen4_that_draft_are_left_out(first, load, tmp_path):
    config = open_checkpoint(first.path).config
    assert isinstance(config, Qwen4Config)
    drafts = {"nextn.eh_proj": (48, 96), "nextn.enorm": (48,), "nextn.hc_head_norm": (96,), "attn_q": (128, 48)}
    more = {f"blk.4.{name}.weight": np.ones(shape, np.float32) for name, shape in drafts.items()}
    written = metadata_of(config)
    counts = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [*written["attention.recurrent_layers"], False],
        "attention.compress_ratios": [*written["attention.compress_ratios"], 0],
    }
    ids = random_ids(20, seed=8)
    (logits,) = Driver(load(convert(first.path, tmp_path / "m.gguf", more, **counts))).step([(1, ids)])
    first.assert_agrees(logits, ids)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.compress_ratios": [0, 4, 0, 8]}, "attention.compress_ratios"),
        ({"attention.compress_ratios": [4, 4, 0, 4]}, "attention.compress_ratios"),
        ({"attention.compress_ratios": [0, 4]}, "attention.compress_ratios"),
        ({"attention.compress_ratios": None}, "attention.compress_ratios"),
        ({"attention.compress_ratios": [0, 0, 0, 0]}, "indexer_compress_ratio"),
        ({"attention.compress_ratios": ["x"] * 4}, "attention.compress_ratios"),
        ({"attention.indexer.top_k": 9}, "indexer_budget"),
        ({"hyper_connection.count": 1}, "hc_count"),
        ({"ple.layers": [0, 2]}, "ple.layers"),
        ({"ple.layers": [9]}, "ple_layer_ids"),
        ({"ple.layers": [1]}, "ple_layer_ids"),
        ({"ple.layers": 2}, "ple.layers"),
        ({"ple.layers": None}, "per_layer_token_embd.weight is a table"),
        ({"ple.ngram_size": 1}, "ple.ngram_size"),
        ({"ple.heads_per_ngram": 1 << 30}, "ple.head_vocab_sizes"),
        ({"ple.conv_kernel": 1}, "ple_conv_kernel_size"),
        ({"ple.eos_token_id": 2.5}, "ple.eos_token_id"),
        ({"ple.eos_token_id": 96}, "eos_token_id"),
        ({"ple.head_vocab_sizes": [41, 43, 47]}, "ple.head_vocab_sizes"),
        ({"ple.head_vocab_sizes": [41, 43, 53, 47]}, "ple.head_vocab_sizes"),
        ({"ple.head_vocab_sizes": np.array([2**40] * 4, np.uint64)}, "rows"),
        ({"ple.head_vocab_sizes": ["x"] * 4}, "ple.head_vocab_sizes"),
        ({"ple.head_offsets": [0, 41, 84, 132]}, "ple.head_offsets"),
        ({"ple.layer_multipliers": [3, 5, 7]}, "ple.layer_multipliers"),
        ({"ple.layer_multipliers": None}, "ple.layer_multipliers"),
        ({"embedding_length_per_layer_input": 0}, "embedding_length_per_layer_input"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"block_count": 1 << 20}, "block_count"),
    ],
)
def test_hostile_metadata_of_qwen4_are_named(metadata, named, first, tmp_path):
    with pytest.raises(ModelError, match=re.escape(named)):
        open_checkpoint(convert(first.path, tmp_path / "m.gguf", **metadata))


def test_a_table_of_qwen4_with_other_rows_is_refused(first, tmp_path):
    with pytest.raises(ModelError, match="has 90 rows, not"):
        open_checkpoint(convert(first.path, tmp_path / "m.gguf", {_TABLE_NAME: np.ones((90, 32), np.float32)}))
