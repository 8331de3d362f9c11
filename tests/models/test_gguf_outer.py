"""GGUF files of models with images, of Ministral 3 and of Mellum give the logits of the model they were made from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import SLIDING
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_window import common_metadata, expert_metadata
from tests.models.tiny import random_ids

_SECTIONS = {"rope.dimension_sections": [2, 2, 2, 0]}


class Conversion(NamedTuple):
    """llama.cpp's name of an architecture, one of the gguf package with the same names of tensors, whether its
    converter interleaves q and k, and what it writes besides the common."""

    name: str
    names_of: gguf.MODEL_ARCH
    interleaved: bool
    metadata: Callable[[ModelConfig], dict[str, Any]]


def yarn_metadata(scaling: dict[str, Any]) -> dict[str, Any]:
    betas = {f"rope.scaling.yarn_{name}": scaling[name] for name in ("beta_fast", "beta_slow") if name in scaling}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": int(scaling["original_max_position_embeddings"]),
        **betas,
    }


def ministral3_metadata(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        **yarn_metadata(scaling),
        "rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"],
        "attention.temperature_scale": config.query_scale.beta,
        "rope.dimension_count": config.head_dim,
    }


def mellum_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **expert_metadata(config),
        **yarn_metadata(config.rope_scaling),
        "rope.freq_base_swa": config.ropes[SLIDING][0],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
    }


def pictures(config: ModelConfig) -> dict[str, Any]:
    return {**_SECTIONS, "n_deepstack_layers": 3}


CONVERSIONS = {
    "qwen2": Conversion("qwen2vl", gguf.MODEL_ARCH.QWEN2VL, False, lambda config: _SECTIONS),
    "qwen3": Conversion("qwen3vl", gguf.MODEL_ARCH.QWEN3VL, False, pictures),
    "qwen3_moe-gguf": Conversion(
        "qwen3vlmoe", gguf.MODEL_ARCH.QWEN3VLMOE, False, lambda config: {**pictures(config), **expert_metadata(config)}
    ),
    "ministral3": Conversion("mistral3", gguf.MODEL_ARCH.MISTRAL3, True, ministral3_metadata),
    "mistral": Conversion("mistral3", gguf.MODEL_ARCH.MISTRAL3, True, lambda config: {}),
    "mellum-gguf": Conversion("mellum", gguf.MODEL_ARCH.QWEN3MOE, False, mellum_metadata),
}


def convert(source: Path, case: str, path: Path, **metadata: Any) -> Path:
    """As llama.cpp's converter does it; metadata of None are left out."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.names_of, config.num_layers)
    tensors = {}
    for name, values in stacked_experts(load_file(source / "model.safetensors")).items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if conversion.interleaved and heads:
            half = len(values) // heads // 2
            values = values.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(values)
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    kept = {key: value for key, value in written.items() if value is not None}
    return write_gguf(path, kept, tensors, architecture=conversion.name)


@pytest.mark.parametrize("case", CONVERSIONS)
def test_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    path = convert(original.path, case, tmp_path / "m.gguf")
    config = open_checkpoint(path).config
    assert config.model_type == open_checkpoint(original.path).config.model_type
    assert config.unknown_options == ()
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def test_mellum_without_a_pattern_has_every_fourth_layer_without_a_window_and_one_base(tiny, tmp_path):
    left_out = {"attention.sliding_window_pattern": None, "rope.freq_base_swa": None}
    config = open_checkpoint(convert(tiny("mellum-gguf").path, "mellum-gguf", tmp_path / "m.gguf", **left_out)).config
    assert config.layer_types == (SLIDING,) * 3
    assert config.ropes[SLIDING] == (5_000.0, None)
    assert config.ropes["full_attention"][0] == 5_000.0


def test_mellum_without_a_window_has_full_attention(tiny, tmp_path):
    left_out = {"attention.sliding_window_pattern": None, "attention.sliding_window": None}
    config = open_checkpoint(convert(tiny("mellum-gguf").path, "mellum-gguf", tmp_path / "m.gguf", **left_out)).config
    assert config.layer_types == ("full_attention",) * 3


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("ministral3", {"rope.scaling.type": "none"}, "attention.temperature_scale without"),
        ("ministral3", {"attention.temperature_scale": -1.0}, "llama_4_scaling_beta"),
        ("ministral3", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("mellum-gguf", {"attention.sliding_window_pattern": [True, False]}, "attention.sliding_window_pattern"),
        ("mellum-gguf", {"attention.sliding_window_pattern": 0}, "attention.sliding_window_pattern"),
        ("mellum-gguf", {"expert_count": 5}, "one part for each expert"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)
