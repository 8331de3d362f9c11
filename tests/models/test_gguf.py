"""GGUF files of each architecture give the logits of the model they were made from."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.tiny import random_ids

# GGUF's name of an architecture, whether its converter interleaves q and k, and a case that the format can express.
ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-biases-tied": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-rope-linear": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-rope-yarn": (gguf.MODEL_ARCH.LLAMA, True),
    "llama-rope-llama3": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral-window": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
    "smollm3-gguf": (gguf.MODEL_ARCH.SMOLLM3, True),
    "olmo2": (gguf.MODEL_ARCH.OLMO2, False),
    "glm": (gguf.MODEL_ARCH.CHATGLM, False),
    "glm-no-biases-tied-whole-heads": (gguf.MODEL_ARCH.CHATGLM, False),
    "glm4": (gguf.MODEL_ARCH.GLM4, False),
    "phi3": (gguf.MODEL_ARCH.PHI3, False),
    "phi3-window-partial-tied": (gguf.MODEL_ARCH.PHI3, False),
    "phi3-longrope-partial": (gguf.MODEL_ARCH.PHI3, False),
    "phimoe-gguf": (gguf.MODEL_ARCH.PHIMOE, False),
    "ernie4_5": (gguf.MODEL_ARCH.ERNIE4_5, False),
    "ernie4_5-biases-untied": (gguf.MODEL_ARCH.ERNIE4_5, False),
    "qwen3_moe-gguf": (gguf.MODEL_ARCH.QWEN3MOE, False),
}


def convert(tiny, case: str, path: Path) -> Path:
    """As llama.cpp's converter does it: names from the gguf package's own table, q and k interleaved."""
    arch, interleaved = ARCHITECTURES[case]
    config = tiny.oracle.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, values in stacked_experts(load_file(tiny.path / "model.safetensors")).items():
        if interleaved and (match := re.search(r"\.(q|k)_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            values = _interleave(values, heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        tensors["rope_freqs.weight"] = (plain / ROPE_INIT_FUNCTIONS["llama3"](config)[0]).numpy()
    if rope["rope_type"] == "longrope":
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return write_gguf(path, _metadata(config), tensors, architecture=gguf.MODEL_ARCH_NAMES[arch])


def _interleave(values, heads):
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def stacked_experts(tensors):
    result = {name: values for name, values in tensors.items() if not re.search(r"\.experts\.\d", name)}
    for name in tensors:
        if ".experts.0." in name:
            count = sum(1 for other in tensors if re.sub(r"experts\.\d+", "experts.0", other) == name)
            stack = [tensors[name.replace("experts.0", f"experts.{i}")] for i in range(count)]
            result[name.replace("experts.0.", "experts.")] = np.stack(stack)
    return result


def _metadata(config):
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if config.model_type == "mistral":
        metadata["attention.sliding_window"] = config.sliding_window
    if config.model_type == "phi3":
        metadata["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type in ("glm", "glm4", "phi3"):
        metadata["rope.dimension_count"] = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    if config.model_type == "phimoe":
        metadata["attention.sliding_window"] = config.sliding_window or 0
        metadata["rope.dimension_count"] = config.head_dim
        metadata["expert_count"] = config.num_local_experts
        metadata["expert_used_count"] = config.num_experts_per_tok
    if config.model_type == "qwen3_moe":
        metadata["expert_count"] = config.num_experts
        metadata["expert_used_count"] = config.num_experts_per_tok
        metadata["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.rope_parameters["rope_type"] in ("linear", "yarn"):
        metadata["rope.scaling.type"] = config.rope_parameters["rope_type"]
        metadata["rope.scaling.factor"] = config.rope_parameters["factor"]
    if config.rope_parameters["rope_type"] == "longrope":
        metadata["rope.scaling.attn_factor"] = ROPE_INIT_FUNCTIONS["longrope"](config)[1]
    if config.rope_parameters["rope_type"] in ("longrope", "yarn"):
        original = config.rope_parameters["original_max_position_embeddings"]
        metadata["rope.scaling.original_context_length"] = original
    return metadata


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    model = load(convert(original, case, tmp_path / "m.gguf"))
    (logits,) = Driver(model).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def joined(file: Path, path: Path, *, dropped: int = 0) -> Path:
    """The file with queries, keys and values of each layer in one tensor, as converted from GLM 4's first release."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for kind in ("weight", "bias"):
        for layer in range(3):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)[dropped:]
    begin = "chatglm."
    metadata = {
        name.removeprefix(begin): field.contents() for name, field in reader.fields.items() if name.startswith(begin)
    }
    return write_gguf(path, metadata, tensors, architecture="chatglm")


def test_glm_with_queries_keys_and_values_in_one_tensor_gives_the_logits_of_the_original(tiny, load, tmp_path):
    original, ids = tiny("glm"), random_ids(40, seed=8)
    path = joined(convert(original, "glm", tmp_path / "m.gguf"), tmp_path / "joined.gguf")
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


def test_glm_with_too_few_rows_in_one_tensor_is_refused(tiny, tmp_path):
    path = joined(convert(tiny("glm"), "glm", tmp_path / "m.gguf"), tmp_path / "joined.gguf", dropped=1)
    with pytest.raises(ModelError, match="not 64 \\+ 2 x 32 rows"):
        open_checkpoint(path)
