"""GGUF files of Gemma 3n give the logits of the model they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.gemma3n_text.config import Gemma3nConfig
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import Tiny, make_oracle, random_ids

DENSE, OTHER = "gemma3n_text", "gemma3n_text-other-stream-untied"
_STACKS = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}


@pytest.fixture(params=[DENSE, OTHER])
def original(request, tiny, tmp_path):
    """A model whose active stream is scaled, which the format takes for granted."""
    if request.param == DENSE:
        return tiny(DENSE)
    oracle = make_oracle(OTHER, altup_correct_scale=True)
    oracle.save_pretrained(tmp_path / "folder")
    return Tiny(tmp_path / "folder", oracle)


def tensors_of(source: Path, config: Gemma3nConfig) -> dict[str, np.ndarray]:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    names, stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, config.num_layers), {}
    given = load_file(source / "model.safetensors")
    for prefix, name in _STACKS.items():
        stored[f"{name}.weight"] = np.stack([given.pop(f"{prefix}.{i}.weight") for i in range(config.streams - 1)])
    for name, values in given.items():
        suffix = ".weight" if name.endswith("_scale") else ""
        stored[names.get_name(name + suffix, try_suffixes=(".weight", ".bias"))] = values
    return stored


def metadata_of(config: Gemma3nConfig) -> dict[str, Any]:
    scales = [float("-inf") if scale is None else scale for scale in config.deviations]
    return {
        **common_metadata(config),
        "activation_sparsity_scale": scales,
        "altup.active_idx": config.active_stream,
        "altup.num_inputs": config.streams,
        "attention.shared_kv_layers": sum(owner != layer for layer, owner in enumerate(config.kv_owners)),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "embedding_length_per_layer_input": config.per_layer_size,
        "feed_forward_length": list(config.intermediate_sizes),
        "final_logit_softcapping": config.logits_cap,
        "rope.freq_base": config.ropes[FULL][0],
        "rope.freq_base_swa": config.ropes[SLIDING][0],
    }


def convert(source: Path, path: Path, more: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, Gemma3nConfig)
    written = {**metadata_of(config), **metadata}
    kept = {key: value for key, value in written.items() if value is not None}
    return write_gguf(path, kept, {**tensors_of(source, config), **(more or {})}, architecture="gemma3n")


def test_converted_gemma3n_gives_the_logits_of_the_original(original, load, tmp_path):
    ids = random_ids(40, seed=8)
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf"))).step([(1, ids)])
    original.assert_agrees(logits, ids)


def test_metadata_of_gemma3n_say_what_the_configuration_said(original, tmp_path):
    expected = open_checkpoint(original.path).config
    got = open_checkpoint(convert(original.path, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert got.deviations == pytest.approx(expected.deviations, abs=1e-6)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "rms_norm_eps": 0.0, "in_bfloat16": True, "deviations": ()}
    assert replace(got, **not_said) == replace(expected, **not_said)


def test_keys_and_values_of_gemma3n_that_no_layer_uses_are_left_out(tiny, load, tmp_path):
    original, ids = tiny(DENSE), random_ids(20, seed=8)
    more = {"blk.3.attn_k.weight": np.ones((24, 48), np.float32), "blk.3.attn_k_norm.weight": np.ones(12, np.float32)}
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf", more))).step([(1, ids)])
    original.assert_agrees(logits, ids)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"activation_sparsity_scale": [1.0]}, "activation_sparsity_scale has 1 entries for 4 layers"),
        ({"activation_sparsity_scale": [float("nan")] * 4}, "activation_sparsity_scale is nan"),
        ({"activation_sparsity_scale": ["x"] * 4}, "activation_sparsity_scale"),
        ({"activation_sparsity_scale": [9e9] * 4}, "activation_sparsity_pattern"),
        ({"activation_sparsity_scale": None}, "activation_sparsity_scale is 'None'"),
        ({"feed_forward_length": [80, 80]}, "feed_forward_length has 2 entries for 4 layers"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"altup.num_inputs": 99}, "altup_num_inputs"),
        ({"altup.active_idx": 4}, "altup_active_idx"),
        ({"attention.shared_kv_layers": 9}, "num_kv_shared_layers"),
    ],
)
def test_hostile_metadata_of_gemma3n_are_named(metadata, named, tiny, tmp_path):
    with pytest.raises(ModelError, match=named):
        open_checkpoint(convert(tiny(DENSE).path, tmp_path / "m.gguf", **metadata))


def test_a_stack_of_gemma3n_that_is_a_matrix_is_named(tiny, tmp_path):
    more = {"altup_proj.weight": np.ones((48, 48), np.float32)}
    with pytest.raises(ModelError, match="altup_projections"):
        open_checkpoint(convert(tiny(DENSE).path, tmp_path / "m.gguf", more))
