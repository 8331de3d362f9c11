"""GGUF files of models with Mamba mixers give the logits of the model they were made from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import random_ids

Named = Iterator[tuple[str, np.ndarray]]
MAX_POSITIONS = 1 << 20  # what the converter writes where there are no positions


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[ModelConfig, str, np.ndarray], Named]
    metadata: Callable[[ModelConfig], dict[str, Any]]


def mamba1_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    values = -np.exp(values) if name.endswith(".A_log") else values
    yield (
        re.sub(r"feed_forward\.experts", "mlp.experts", name),
        values.squeeze(1) if "conv1d.weight" in name else values,
    )


def mamba2_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    if name.endswith((".A_log", ".D")):
        values = values.reshape(-1, 1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.reshape(config.mixer.num_groups, -1)
    ((name, values),) = mamba1_tensors(config, name, values)
    yield (
        name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias"),
        values,
    )


def falcon_h1_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    """All multipliers go into weights."""
    into = config.attention_in_multiplier
    factors = {
        "embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": into,
        "k_proj.weight": into * config.key_multiplier,
        "v_proj.weight": into,
        "o_proj.weight": config.attention_out_multiplier,
        "out_proj.weight": config.ssm_out_multiplier,
    }
    factor = next((factor for ending, factor in factors.items() if name.endswith(f".{ending}") or name == ending), 1.0)
    if name.endswith("in_proj.weight"):
        inner = config.mixer.num_heads * config.mixer.head_dim
        per_group = config.mixer.num_groups * config.mixer.state_size
        runs = [inner, inner, per_group, per_group, config.mixer.num_heads]
        factor = config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, runs)[:, None]
    yield from mamba2_tensors(config, name, (values * factor).astype(np.float32))


def llama_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    """The rows of q and k in pairs."""
    if match := re.search(r"\.(q|k)_proj\.weight", name):
        heads = config.num_heads if match[1] == "q" else config.num_kv_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, values.shape[1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    yield from mamba2_tensors(config, name, values)


def granite_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    """Gate and up are parted, under the names of an MLP of its own where there are no experts."""
    shared = "mlp.shared_expert" if config.num_experts else "mlp"
    parts = {"block_sparse_moe": "mlp.experts", "shared_mlp": shared}
    match = re.fullmatch(r"(.*\.)(block_sparse_moe|shared_mlp)\.(input|output)_linear\.weight", name)
    if match is None:
        yield from llama_tensors(config, name, values)
    elif match[3] == "output":
        yield f"{match[1]}{parts[match[2]]}.down_proj.weight", values
    else:
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{match[1]}{parts[match[2]]}.{part}_proj.weight", half


def nemotron_h_tensors(config: ModelConfig, name: str, values: np.ndarray) -> Named:
    name = re.sub(r"backbone(.*)\.mixer\.experts\.", r"model\1.mlp.experts.", name)
    yield from llama_tensors(config, name, values)


def mixer_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mixer.width,
        "ssm.inner_size": config.mixer.num_heads * config.mixer.head_dim,
        "ssm.state_size": config.mixer.state_size,
        "ssm.time_step_rank": config.mixer.num_heads,
        "ssm.group_count": config.mixer.num_groups,
    }


def mixers_only(config: ModelConfig) -> dict[str, Any]:
    return {
        "block_count": config.num_layers,
        "context_length": MAX_POSITIONS,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def mamba_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **mixers_only(config),
        "ssm.conv_kernel": config.mixer.width,
        "ssm.inner_size": config.mixer.intermediate_size,
        "ssm.state_size": config.mixer.state_size,
        "ssm.time_step_rank": config.mixer.dt_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
    }


def mamba2_metadata(config: ModelConfig) -> dict[str, Any]:
    return {**mixers_only(config), **mixer_metadata(config)}


def falcon_h1_metadata(config: ModelConfig) -> dict[str, Any]:
    return {**common_metadata(config), **mixer_metadata(config), "vocab_size": config.vocab_size}


def kv_heads(config: ModelConfig) -> list[int]:
    return [config.num_kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def without_rope(config: ModelConfig) -> dict[str, Any]:
    return {
        **common_metadata(config),
        **mixer_metadata(config),
        "context_length": MAX_POSITIONS,
        "attention.head_count_kv": kv_heads(config),
        "rope.dimension_count": config.head_dim,
        "rope.scaling.finetuned": False,
        "rope.freq_base": 1e4,
    }


def granite_scales(config: ModelConfig) -> dict[str, Any]:
    own = config.multipliers
    return {
        "attention.scale": own.attention,
        "embedding_scale": own.embedding,
        "residual_scale": own.residual,
        "logit_scale": own.logits,
    }


def granite_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **without_rope(config),
        **granite_scales(config),
        "expert_count": config.num_experts,
        "expert_used_count": config.experts.per_token if config.experts else 0,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }


def nemotron_h_metadata(config: ModelConfig) -> dict[str, Any]:
    inner = config.experts.intermediate_size if "moe" in config.layer_types else config.intermediate_size
    metadata = without_rope(config)
    metadata["feed_forward_length"] = [inner if kind in ("mlp", "moe") else 0 for kind in config.layer_types]
    if "moe" not in config.layer_types:
        return metadata
    return metadata | {
        "expert_count": config.experts.num_experts,
        "expert_used_count": config.experts.per_token,
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": config.experts.shared_size,
        "expert_shared_count": 1,
        "expert_group_count": 1,
        "expert_weights_norm": config.experts.normalize,
        "expert_weights_scale": config.experts.scale,
        "moe_latent_size": config.experts.latent_size,
    }


def jamba_metadata(config: ModelConfig) -> dict[str, Any]:
    metadata = common_metadata(config)
    del metadata["rope.freq_base"], metadata["attention.key_length"], metadata["attention.value_length"]
    return {
        **metadata,
        "attention.head_count_kv": kv_heads(config),
        "ssm.conv_kernel": config.mixer.width,
        "ssm.inner_size": config.mixer.intermediate_size,
        "ssm.state_size": config.mixer.state_size,
        "ssm.time_step_rank": config.mixer.dt_rank,
        "expert_count": config.experts.num_experts,
        "expert_used_count": config.experts.per_token,
    }


MAMBA = Conversion(gguf.MODEL_ARCH.MAMBA, mamba1_tensors, mamba_metadata)
JAMBA = Conversion(gguf.MODEL_ARCH.JAMBA, mamba1_tensors, jamba_metadata)
GRANITE = Conversion(gguf.MODEL_ARCH.GRANITE_HYBRID, granite_tensors, granite_metadata)

# Cases that the format can express.
CONVERSIONS = {
    "mamba": MAMBA,
    "mamba-biases-untied": MAMBA,
    "falcon_mamba-biases": MAMBA,
    "mamba2": Conversion(gguf.MODEL_ARCH.MAMBA2, mamba2_tensors, mamba2_metadata),
    "falcon_h1": Conversion(gguf.MODEL_ARCH.FALCON_H1, falcon_h1_tensors, falcon_h1_metadata),
    "granitemoehybrid": GRANITE,
    "granitemoehybrid-gguf": GRANITE,
    "granitemoehybrid-biases-no-attention": GRANITE,
    "nemotron_h-gguf": Conversion(gguf.MODEL_ARCH.NEMOTRON_H, nemotron_h_tensors, nemotron_h_metadata),
    "nemotron_h-biases-latent-experts": Conversion(
        gguf.MODEL_ARCH.NEMOTRON_H_MOE, nemotron_h_tensors, nemotron_h_metadata
    ),
    "jamba": JAMBA,
    "jamba-dense-biases-tied": JAMBA,
    "jamba-no-attention": JAMBA,
}


def convert(source: Path, case: str, path: Path, **metadata: Any) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers)
    tensors = {
        names.get_name(new, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(changed)
        for name, values in stacked_experts(load_file(source / "model.safetensors")).items()
        for new, changed in conversion.tensors(config, name, values)
    }
    assert None not in tensors
    written = {**conversion.metadata(config), **metadata}
    return write_gguf(path, written, tensors, architecture=gguf.MODEL_ARCH_NAMES[conversion.arch])


@pytest.mark.parametrize("case", CONVERSIONS)
def test_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    path = convert(original.path, case, tmp_path / "m.gguf")
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def own_values(config: ModelConfig) -> dict[str, Any]:
    """What the family has beyond all others."""
    shared = {field.name for field in fields(ModelConfig)} - {"layer_types"}
    own = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in shared}
    for parts in (own.pop("multipliers", None), config.experts):
        own |= {} if parts is None else asdict(parts)
    return own


@pytest.mark.parametrize("case", CONVERSIONS)
def test_the_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config
    assert got.model_type == expected.model_type
    assert (got.num_layers, got.hidden_size) == (expected.num_layers, expected.hidden_size)
    multipliers = {name for name in own_values(expected) if "multiplier" in name} if case == "falcon_h1" else set()
    for name, value in own_values(expected).items():
        if name not in multipliers:
            assert own_values(got)[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert got.max_position_embeddings <= 1 << 17


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("mamba2", {"ssm.time_step_rank": 5}, "5 heads"),
        ("mamba2", {"ssm.inner_size": 100}, "100 channels"),
        ("mamba2", {"block_count": 10**6}, "num_hidden_layers"),
        ("falcon_h1", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("granitemoehybrid", {"rope.scaling.finetuned": True}, "Bamba"),
        ("granitemoehybrid", {"block_count": 10**6}, "blocks in a file"),
        ("granitemoehybrid", {"attention.head_count_kv": ["two"]}, "num_key_value_heads"),
        ("nemotron_h-biases-latent-experts", {"expert_gating_func": 1}, "gating function 1"),
        ("nemotron_h-biases-latent-experts", {"expert_group_count": 2}, "2 groups of experts"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)


def test_decays_that_are_not_negative_are_refused(tiny, load, tmp_path):
    stored = load_file(tiny("mamba2").path / "model.safetensors")
    stored["backbone.layers.1.mixer.A_log"][0] = -math.inf
    (tmp_path / "config.json").write_bytes((tiny("mamba2").path / "config.json").read_bytes())
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="decay"):
        load(convert(tmp_path, "mamba2", tmp_path / "m.gguf"))
