"""GGUF files of Gemma 4 give the logits of the model they were made from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.parts.gemma4 import Gemma4Config
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf_window import common_metadata, expert_metadata
from tests.models.tiny import random_ids

DENSE, KEYS, MIXTURE = "gemma4_text", "gemma4_text-values-from-keys", "gemma4_text-experts"
CASES = (DENSE, KEYS, MIXTURE, "gemma4_text-pattern")
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_NOT_ROTATED = 1e30


def tensors_of(source: Path, config: Gemma4Config) -> dict[str, np.ndarray]:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_layers)
    tensors = {"rope_freqs.weight": rope_factors(config)}
    for name, values in load_file(source / "model.safetensors").items():
        scale = re.fullmatch(r"model\.layers\.(\d+)\.(router\.\w*scale)", name)
        if scale:
            tensors[f"blk.{scale[1]}.{_SCALES[scale[2]]}"] = values
            continue
        suffix = ".weight" if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")) else ""
        tensors[names.get_name(name + suffix, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def rope_factors(config: Gemma4Config) -> np.ndarray:
    half = config.heads[FULL].dim // 2
    kept = int(half * config.ropes[FULL][1]["partial_rotary_factor"])
    return np.array([1.0] * kept + [_NOT_ROTATED] * (half - kept), np.float32)


def metadata_of(config: Gemma4Config) -> dict[str, Any]:
    full, windowed = config.heads[FULL], config.heads[SLIDING]
    size, kinds = config.intermediate_size, config.layer_types
    reads = [owner != layer for layer, owner in enumerate(config.kv_owners)]
    return {
        **common_metadata(config),
        **(expert_metadata(config) if config.experts else {}),
        "attention.head_count_kv": [config.heads[kind].num_kv_heads for kind in kinds],
        "attention.key_length": full.dim,
        "attention.value_length": full.dim,
        "attention.key_length_swa": windowed.dim,
        "attention.value_length_swa": windowed.dim,
        "attention.shared_kv_layers": sum(reads),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "embedding_length_per_layer_input": config.per_layer_size,
        "feed_forward_length": [size * 2 if read else size for read in reads] if config.wide_readers else size,
        "final_logit_softcapping": config.logits_cap or None,
        "rope.dimension_count": full.dim,
        "rope.dimension_count_swa": windowed.dim,
        "rope.freq_base": config.ropes[FULL][0],
        "rope.freq_base_swa": config.ropes[SLIDING][0],
    }


def convert(source: Path, path: Path, more: dict[str, np.ndarray | None] | None = None, **metadata: Any) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, Gemma4Config)
    written = {**metadata_of(config), **metadata}
    tensors = {**tensors_of(source, config), **(more or {})}
    kept = {key: value for key, value in written.items() if value is not None}
    there = {name: np.ascontiguousarray(values) for name, values in tensors.items() if values is not None}
    return write_gguf(path, kept, there, architecture="gemma4")


@pytest.mark.parametrize("case", [DENSE, KEYS, MIXTURE])
def test_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    path = convert(original.path, tmp_path / "m.gguf")
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_converted_model_gives_the_bits_of_the_folder_it_was_made_from(case, tiny, load, tmp_path):
    source, ids = tiny(case).path, random_ids(40, seed=8)
    models = [load(source), load(convert(source, tmp_path / "m.gguf"))]
    (expected,), (logits,) = (Driver(model).step([(1, ids)]) for model in models)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert got.unknown_options == ()
    full = ("proportional", rope_factors(expected).tolist().count(1) / len(rope_factors(expected)))
    theta, scaling = got.ropes[FULL]
    assert (theta, scaling["rope_type"], scaling["partial_rotary_factor"]) == (expected.ropes[FULL][0], *full)
    assert got.ropes[SLIDING] == expected.ropes[SLIDING]
    not_said = {"bos_token_id": None, "eos_token_ids": (), "rms_norm_eps": 0.0, "in_bfloat16": True}
    not_said |= {"ropes": {}, "rope_scaling": None, "unknown_options": (), "bidirectional": False}
    assert replace(got, **not_said) == replace(expected, **not_said)


def test_experts_whose_gate_and_up_are_parted_give_the_same_logits(tiny, load, tmp_path):
    original, ids = tiny(MIXTURE), random_ids(20, seed=8)
    parted: dict[str, np.ndarray | None] = {}
    for name, values in tensors_of(original.path, open_checkpoint(original.path).config).items():
        if ".ffn_gate_up_exps." in name:
            gate, up = np.split(values, 2, axis=1)
            parted |= {name: None, name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    assert parted
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf", parted))).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def test_keys_and_values_that_no_layer_uses_are_left_out(tiny, load, tmp_path):
    original, ids = tiny(DENSE), random_ids(20, seed=8)
    shapes = {"attn_k.weight": (40, 48), "attn_v.weight": (40, 48), "attn_k_norm.weight": (20,)}
    more = {f"blk.3.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf", more))).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def test_absent_count_of_layers_that_share_and_cap_of_0_are_none(tiny, tmp_path):
    none = {"attention.shared_kv_layers": None, "final_logit_softcapping": 0.0}
    config = open_checkpoint(convert(tiny(KEYS).path, tmp_path / "m.gguf", **none)).config
    assert config.kv_owners == (0, 1, 2)
    assert config.logits_cap == 0


_FACTORS = "rope_freqs.weight"


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        (DENSE, {_FACTORS: None}, "rope_freqs"),
        (DENSE, {_FACTORS: np.array([1] * 5, np.float32)}, "not 10 factors"),
        (DENSE, {_FACTORS: np.array([1] * 5 + [8] * 5, np.float32)}, "not 10 factors"),
        (DENSE, {_FACTORS: np.array([1e30] * 10, np.float32)}, "not 10 factors"),
        (DENSE, {_FACTORS: np.array([1] * 3 + [1e30, 1] + [1e30] * 5, np.float32)}, "not 10 factors"),
        (DENSE, {_FACTORS: np.array([1] * 3 + [np.nan] * 7, np.float32)}, "not 10 factors"),
        (DENSE, {"blk.0.layer_output_scale.weight": None}, "layer_scalar"),
        (DENSE, {"blk.0.attn_v.weight": None}, "v_proj"),
        (DENSE, {"blk.0.attn_k.scale": np.ones(1, np.float32)}, "attn_k.scale"),
        (DENSE, {"blk.0.ffn_gate_inp.weight": np.ones((6, 48), np.float32)}, "router"),
        (DENSE, {"per_layer_token_embd.weight": None}, "embed_tokens_per_layer"),
        (KEYS, {"blk.0.attn_v.weight": np.ones((20, 48), np.float32)}, "attn_v"),
        (KEYS, {"per_layer_proj_norm.weight": np.ones(8, np.float32)}, "per_layer_projection_norm"),
        (MIXTURE, {"blk.0.ffn_gate_inp.scale": None}, "router.scale"),
        (MIXTURE, {"blk.0.ffn_down_exps.scale": None}, "per_expert_scale"),
        (MIXTURE, {"blk.0.ffn_gate_up_exps.weight": np.ones((6, 47, 48), np.float32)}, "gate and up"),
        (MIXTURE, {"blk.0.ffn_gate_up_exps.weight": np.ones((5, 48, 48), np.float32)}, "each expert"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(case, tensors, message, tiny, load, tmp_path):
    path = convert(tiny(case).path, tmp_path / "m.gguf", tensors)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(path)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        (DENSE, {"attention.sliding_window_pattern": [True, False, True, True]}, "the last has no window"),
        (DENSE, {"attention.sliding_window_pattern": [True, False]}, "2 entries for 4 layers"),
        (DENSE, {"attention.sliding_window_pattern": 2}, "not a flag for each layer"),
        (DENSE, {"attention.sliding_window_pattern": None}, "not a flag for each layer"),
        (DENSE, {"attention.shared_kv_layers": 3, "feed_forward_length": 80}, "num_kv_shared_layers"),
        (DENSE, {"attention.shared_kv_layers": 1}, "feed_forward_length"),
        (DENSE, {"attention.shared_kv_layers": 1.0}, "attention.shared_kv_layers is 1.0"),
        (DENSE, {"attention.shared_kv_layers": 1 << 20, "feed_forward_length": 80}, "num_kv_shared_layers"),
        (DENSE, {"attention.head_count_kv": [1, 2, 2, 2]}, "layers of a kind"),
        (DENSE, {"attention.head_count_kv": [2, 2, 2]}, "3 entries for 4 layers"),
        (DENSE, {"attention.key_length_swa": None}, "attention.key_length_swa is 'None'"),
        (DENSE, {"attention.value_length_swa": 6}, "attention.value_length_swa is 6"),
        (DENSE, {"attention.value_length": 6}, "attention.value_length is 6"),
        (DENSE, {"attention.sliding_window": None}, "sliding_window"),
        (DENSE, {"rope.dimension_count_swa": 6}, "rope.dimension_count_swa is 6"),
        (DENSE, {"rope.dimension_count": 6}, "rope.dimension_count is 6"),
        (DENSE, {"rope.freq_base_swa": None}, "rope.freq_base_swa is missing"),
        (DENSE, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "rope.scaling.type"),
        (DENSE, {"embedding_length_per_layer_input": None}, "embedding_length_per_layer_input is 'None'"),
        (DENSE, {"embedding_length_per_layer_input": 0}, "per_layer"),
        (DENSE, {"feed_forward_length": [96, 96, 96, 192]}, "feed_forward_length"),
        (DENSE, {"feed_forward_length": [96]}, "1 entries for 4 layers"),
        (DENSE, {"attention.scale": 0.5}, "attention.scale"),
        (DENSE, {"block_count": 1 << 20}, "block_count"),
        (MIXTURE, {"expert_count": None}, "each expert"),
        (MIXTURE, {"expert_used_count": None}, "num_experts_per_tok is missing"),
        (MIXTURE, {"expert_weights_scale": 2.5}, "expert_weights_scale"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, load, tmp_path):
    path = convert(tiny(case).path, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(path)
