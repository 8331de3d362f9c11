"""GGUF files of models with delta rules and latent attention give the logits of the model they were made from."""

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
from forebay.families.config.model_config import Experts, ModelConfig
from forebay.families.parts.experts import GroupedExperts
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import random_ids

Named = Iterator[tuple[str, np.ndarray]]


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration besides the common."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[str, np.ndarray, ModelConfig], Named]
    metadata: Callable[[ModelConfig], dict[str, Any]]


def decays(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    return name.replace("dt_bias", "dt_proj.bias"), -np.exp(values) if name.endswith("A_log") else values


def qwen_norms(name: str, values: np.ndarray) -> np.ndarray:
    own = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return values + 1 if own else values.squeeze() if "conv1d" in name or "shared_expert_gate" in name else values


def qwen3_5_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    """Value heads go from grouped by key head to one of each key head after the other."""
    groups, size = config.delta.num_key_heads, config.delta.value_head_dim
    keys = 2 * groups * config.delta.key_head_dim

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        return part.reshape(groups, -1, size, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    values = qwen_norms(name, values)
    if "in_proj_qkv." in name or "conv1d" in name:
        values = np.concatenate([values[:keys], tiled(values[keys:], size)])
    elif "in_proj_z" in name:
        values = tiled(values, size)
    elif re.search(r"in_proj_[ab]\.|A_log|dt_bias", name):
        values = tiled(values, 1)
    elif "linear_attn.out_proj" in name:
        values = tiled(values.T, size).T
    yield decays(name, values)


def qwen3_next_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    if not name.endswith("in_proj_qkvz.weight"):
        yield decays(name, qwen_norms(name, values))
        return
    key, groups = config.delta.key_head_dim, config.delta.num_key_heads
    value = config.delta.value_head_dim * config.delta.num_value_heads // groups
    by_head = values.reshape(groups, 2 * key + 2 * value, -1)
    parts = np.split(by_head, [key, 2 * key, 2 * key + value], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
    yield name.replace("qkvz", "z"), z


def qwen_metadata(config: ModelConfig) -> dict[str, Any]:
    metadata = {
        "ssm.conv_kernel": config.delta.width,
        "ssm.state_size": config.delta.key_head_dim,
        "ssm.group_count": config.delta.num_key_heads,
        "ssm.time_step_rank": config.delta.num_value_heads,
        "ssm.inner_size": config.delta.num_value_heads * config.delta.value_head_dim,
        "full_attention_interval": 2,
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": [11, 11, 10, 0],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
    }
    if config.experts is None:
        return metadata
    shared = {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    return {**metadata, **expert_metadata(config), **shared}


def expert_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        "expert_count": config.experts.num_experts,
        "expert_used_count": config.experts.per_token,
        "expert_feed_forward_length": config.experts.intermediate_size,
    }


def latent_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values
        return
    by_head = values.reshape(config.num_heads, -1, values.shape[1])
    keys, heads = np.split(by_head, [config.latent.nope_dim], axis=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), heads


def kimi_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    if ".0.block_sparse_moe" in name:  # which is how transformers writes the MLP of that layer
        name = name.replace("block_sparse_moe", "mlp")
    for here, there in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f"block_sparse_moe.experts.{here}", f"mlp.experts.{there}")
    if "conv1d" in name:
        values = values.reshape(1, len(values), 1, -1)
    yield from latent_tensors(*decays(name, values), config)


def latent_metadata(config: ModelConfig) -> dict[str, Any]:
    """Keys and values are those of one head that all share; their lengths are those of what it holds."""
    rank, rotated = config.latent.rank, config.latent.rope_dim
    metadata = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.latent.nope_dim + rotated,
        "attention.value_length_mla": config.latent.value_dim,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_shared_count": config.experts.shared_size // config.experts.intermediate_size,
        "expert_weights_scale": config.experts.scale,
        "expert_gating_func": 2,
        "vocab_size": config.vocab_size,
        **expert_metadata(config),
    }
    return {**metadata, "attention.q_lora_rank": config.latent.q_rank} if config.latent.q_rank else metadata


def deepseek_metadata(config: ModelConfig) -> dict[str, Any]:
    yarn = config.rope_scaling
    metadata = {
        **latent_metadata(config),
        "expert_group_count": config.experts.groups,
        "expert_group_used_count": config.experts.best_groups,
    }
    if config.experts.normalize:
        metadata["expert_weights_norm"] = True
    if yarn is None:
        return metadata
    return {
        **metadata,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": int(yarn["original_max_position_embeddings"]),
        "rope.scaling.yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
    }


def kimi_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **latent_metadata(config),
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.value_length": 72,  # what published configurations call head_dim
        "ssm.conv_kernel": config.delta.width,
        "kda.head_dim": config.delta.head_dim,
    }


def mistral4_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    """Gate and up of the experts stay in one stack, as transformers has them."""
    kind = ".weight" if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else ""
    yield from latent_tensors(name + kind, values, config)


def mistral4_metadata(config: ModelConfig) -> dict[str, Any]:
    """Experts are weighed by a softmax, which is not said, and the scale of queries is neither."""
    metadata = deepseek_metadata(config)
    del metadata["expert_gating_func"]
    return metadata


QWEN3_5 = (qwen3_5_tensors, qwen_metadata)
CONVERSIONS = {
    "qwen3_5_text": Conversion(gguf.MODEL_ARCH.QWEN35, *QWEN3_5),
    "qwen3_5_text-one-key-head-biases-tied": Conversion(gguf.MODEL_ARCH.QWEN35, *QWEN3_5),
    "qwen3_5_moe_text": Conversion(gguf.MODEL_ARCH.QWEN35MOE, *QWEN3_5),
    "qwen3_next": Conversion(gguf.MODEL_ARCH.QWEN3NEXT, qwen3_next_tensors, qwen_metadata),
    "deepseek_v3-gguf": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, latent_tensors, deepseek_metadata),
    "deepseek_v3-dense": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, latent_tensors, deepseek_metadata),
    "mistral4-gguf": Conversion(gguf.MODEL_ARCH.MISTRAL4, mistral4_tensors, mistral4_metadata),
    "kimi_linear-gguf": Conversion(gguf.MODEL_ARCH.KIMI_LINEAR, kimi_tensors, kimi_metadata),
}


def convert(source: Path, case: str, path: Path, **metadata: Any) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers)
    tensors = {
        names.get_name(new, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(changed)
        for name, values in stacked_experts(load_file(source / "model.safetensors")).items()
        for new, changed in conversion.tensors(name, values, config)
    }
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    return write_gguf(path, written, tensors, architecture=gguf.MODEL_ARCH_NAMES[conversion.arch])


@pytest.mark.parametrize("case", CONVERSIONS)
def test_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    (logits,) = Driver(load(convert(original.path, case, tmp_path / "m.gguf"))).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CONVERSIONS)
def test_the_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert got.num_experts == 0 or round_scale(got.experts) == round_scale(expected.experts)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "rms_norm_eps": 0.0, "experts": None, "in_bfloat16": True}
    assert replace(got, **not_said) == replace(expected, **not_said)


def round_scale(experts: Experts) -> Experts:
    """The format's numbers are of single precision."""
    return replace(experts, scale=round(experts.scale, 5)) if isinstance(experts, GroupedExperts) else experts


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("qwen3_5_text", {"nextn_predict_layers": 1}, "draft tokens"),
        ("qwen3_5_text", {"ssm.inner_size": 71}, "channels"),
        ("qwen3_5_text", {"ssm.time_step_rank": 0}, "ssm.time_step_rank"),
        ("qwen3_5_text", {"rope.dimension_count": 17}, "rotated"),
        ("qwen3_5_text", {"attention.recurrent_layers": [False, False]}, "contradicts"),
        ("qwen3_5_text", {"block_count": 1 << 20}, "block_count"),
        ("deepseek_v3-gguf", {"expert_gating_func": 1}, "gating function 1"),
        ("deepseek_v3-gguf", {"attention.key_length": 25}, "entries of a key"),
        ("deepseek_v3-gguf", {"rope.scaling.yarn_log_multiplier": 0.0}, "ambiguous"),
        ("mistral4-gguf", {"expert_gating_func": 2}, "gating function 2"),
        ("mistral4-gguf", {"rope.scaling.yarn_log_multiplier": 0.0}, "ambiguous"),
        ("mistral4-gguf", {"attention.temperature_scale": -1.0}, "llama_4_scaling_beta"),
        ("kimi_linear-gguf", {"attention.key_length_mla": 8}, "qk_nope_head_dim"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)
