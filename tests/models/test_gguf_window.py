"""GGUF files of models with convolutions, windows and sinks give the logits of the model they were made from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.tiny import random_ids

Named = Iterator[tuple[str, np.ndarray]]


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration besides the common."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[str, np.ndarray], Named]
    metadata: Callable[[ModelConfig], dict[str, Any]]


def lfm2_tensors(name: str, values: np.ndarray) -> Named:
    name = name.removeprefix("model.") if ".experts." in name else name
    yield name.replace("expert_bias", "expert_bias.bias"), values.squeeze(1) if "conv.conv" in name else values


def lfm2_metadata(config: ModelConfig) -> dict[str, Any]:
    heads = [config.num_kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    width = config.conv_width
    return {"attention.head_count_kv": heads, "shortconv.l_cache": width, "vocab_size": config.vocab_size}


def lfm2_moe_metadata(config: ModelConfig) -> dict[str, Any]:
    dense = {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    return {**lfm2_metadata(config), **expert_metadata(config), **dense}


def expert_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        "expert_count": config.experts.num_experts,
        "expert_used_count": config.experts.per_token,
        "expert_feed_forward_length": config.experts.intermediate_size,
    }


def gemma3_tensors(name: str, values: np.ndarray) -> Named:
    yield name, values + 1 if name.endswith("norm.weight") else values


def gemma3_metadata(config: ModelConfig) -> dict[str, Any]:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling["factor"]}
    return {"attention.sliding_window": config.sliding_window, **scaling}


def gpt_oss_tensors(name: str, values: np.ndarray) -> Named:
    """Experts' weights get their outputs before their inputs, and gate and up are parted."""
    stem, bias, _ = name.partition("_bias")
    kind = "bias" if bias else "weight"
    outputs = values if bias or values.ndim < 3 else values.swapaxes(1, 2)
    if "gate_up" in name:
        yield f"{stem.replace('gate_up', 'gate')}.{kind}", outputs[:, ::2]
        yield f"{stem.replace('gate_up', 'up')}.{kind}", outputs[:, 1::2]
    elif ".experts." in name:
        yield f"{stem}.{kind}", outputs
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, values


def gpt_oss_metadata(config: ModelConfig) -> dict[str, Any]:
    yarn = config.rope_scaling
    return {
        **expert_metadata(config),
        "attention.sliding_window": config.sliding_window,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": int(yarn["original_max_position_embeddings"]),
        "rope.scaling.yarn_beta_fast": yarn["beta_fast"],
        "rope.scaling.yarn_beta_slow": yarn["beta_slow"],
    }


CONVERSIONS = {
    "lfm2": Conversion(gguf.MODEL_ARCH.LFM2, lfm2_tensors, lfm2_metadata),
    "lfm2-convolutions-only": Conversion(gguf.MODEL_ARCH.LFM2, lfm2_tensors, lfm2_metadata),
    "lfm2_moe": Conversion(gguf.MODEL_ARCH.LFM2MOE, lfm2_tensors, lfm2_moe_metadata),
    "gemma3_text-gguf": Conversion(gguf.MODEL_ARCH.GEMMA3, gemma3_tensors, gemma3_metadata),
    "gpt_oss": Conversion(gguf.MODEL_ARCH.GPT_OSS, gpt_oss_tensors, gpt_oss_metadata),
}


def convert(source: Path, case: str, path: Path, **metadata: Any) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers)
    tensors = {
        names.get_name(new, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(changed)
        for name, values in stacked_experts(load_file(source / "model.safetensors")).items()
        for new, changed in conversion.tensors(name, values)
    }
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    return write_gguf(path, written, tensors, architecture=gguf.MODEL_ARCH_NAMES[conversion.arch])


def common_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }


@pytest.mark.parametrize("case", CONVERSIONS)
def test_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    path = convert(original.path, case, tmp_path / "m.gguf")
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


# Without attention the number of KV heads is in no file.
@pytest.mark.parametrize("case", [case for case in CONVERSIONS if case != "lfm2-convolutions-only"])
def test_the_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True}
    assert replace(got, rms_norm_eps=0.0) == replace(expected, rms_norm_eps=0.0, **not_said)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("lfm2", {"attention.head_count_kv": 2}, "KV heads"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1]}, "KV heads"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "layer_types"),
        ("lfm2_moe", {"expert_gating_func": 1}, "gating function 1"),
        ("gemma3_text-gguf", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text-gguf", {"attention.sliding_window_pattern": [True, False]}, "list"),
        ("gpt_oss", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("gpt_oss", {"expert_count": 5}, "one part for each expert"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)
