"""GGUF files of models with experts give the logits of the model they were made from."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from tests.models.heads import make_headed
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_delta import Named, deepseek_metadata, expert_metadata, latent_tensors, round_scale
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import random_ids


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration besides the common. `name`
    is that of the architecture, where the gguf package is older than it: `arch` has the same tensors."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[str, np.ndarray, ModelConfig], Named]
    metadata: Callable[[ModelConfig], dict[str, Any]]
    name: str = ""


def as_they_are(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    """The correction of the experts' scores gets a suffix, and matrices of one row lose it."""
    row = "shared_expert_gate" in name or "moe_statics" in name
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield re.sub(r"\.expert_bias$", ".expert_bias.bias", name), values.squeeze() if row else values


def mixtral_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    """Rotary pairs become neighbours, and experts get the names of the first Llama's files."""
    if match := re.search(r"\.(q|k)_proj\.", name):
        heads = config.num_heads if match[1] == "q" else config.num_kv_heads
        values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    yield re.sub(r"^model\.(.*)\.block_sparse_moe\.experts\.", r"\1.feed_forward.experts.", name), values


def wide_metadata(config: ModelConfig) -> dict[str, Any]:
    """Experts have the size that others call an MLP's."""
    return {"expert_count": config.experts.num_experts, "expert_used_count": config.experts.per_token}


def mixtral_metadata(config: ModelConfig) -> dict[str, Any]:
    return {**wide_metadata(config), "vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}


def qwen2_metadata(config: ModelConfig) -> dict[str, Any]:
    return {**expert_metadata(config), "expert_shared_feed_forward_length": config.shared_intermediate_size}


def minimax_metadata(config: ModelConfig) -> dict[str, Any]:
    return {**expert_metadata(config), "rope.dimension_count": config.rotary_dim, "expert_gating_func": 2}


def ernie_metadata(config: ModelConfig) -> dict[str, Any]:
    shared = config.shared_size // config.experts.intermediate_size
    return {
        **expert_metadata(config),
        "interleave_moe_layer_step": 2,
        "leading_dense_block_count": 1,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_kv_heads,
    }


def grouped_metadata(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return {
        **expert_metadata(config),
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.best_groups,
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        "expert_weights_scale": experts.scale,
        "expert_weights_norm": experts.normalize,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def glm_metadata(config: ModelConfig) -> dict[str, Any]:
    rotated = getattr(config, "rotary_dim", config.head_dim)
    return {**grouped_metadata(config), "rope.dimension_count": rotated, "nextn_predict_layers": 0}


def flash_metadata(config: ModelConfig) -> dict[str, Any]:
    """Without the gating function, of which its config.json says nothing."""
    metadata = {**deepseek_metadata(config), "nextn_predict_layers": 0}
    del metadata["expert_gating_func"]
    return metadata


def hy_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **expert_metadata(config),
        "expert_shared_feed_forward_length": config.experts.shared_size,
        "expert_weights_norm": True,
        "expert_weights_scale": config.experts.scale,
        "expert_gating_func": 2,
    }


CONVERSIONS = {
    "mixtral": Conversion(gguf.MODEL_ARCH.LLAMA, mixtral_tensors, mixtral_metadata),
    "qwen2_moe": Conversion(gguf.MODEL_ARCH.QWEN2MOE, as_they_are, qwen2_metadata),
    "minimax_m2": Conversion(gguf.MODEL_ARCH.MINIMAXM2, as_they_are, minimax_metadata),
    "olmoe": Conversion(gguf.MODEL_ARCH.OLMOE, as_they_are, wide_metadata),
    "ernie4_5_moe-gguf": Conversion(gguf.MODEL_ARCH.ERNIE4_5_MOE, as_they_are, ernie_metadata),
    "glm4_moe": Conversion(gguf.MODEL_ARCH.GLM4_MOE, as_they_are, glm_metadata),
    "glm4_moe-plain-whole-heads-tied": Conversion(gguf.MODEL_ARCH.GLM4_MOE, as_they_are, glm_metadata),
    "dots1-gguf": Conversion(gguf.MODEL_ARCH.DOTS1, as_they_are, grouped_metadata),
    "hy_v3": Conversion(gguf.MODEL_ARCH.DOTS1, as_they_are, hy_metadata, "hy_v3"),
    "solar_open": Conversion(gguf.MODEL_ARCH.GLM4_MOE, as_they_are, glm_metadata),
    "glm4_moe_lite": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, latent_tensors, flash_metadata),
}
# Those that are read as another type, whose architecture they have.
AS_ANOTHER = {"solar_open": "glm4_moe", "glm4_moe_lite": "deepseek_v3"}


def _draft_name(name: str) -> str:
    """Return the name of a tensor beside the block that drafts, which newer tables have for all of these."""
    name = name.replace(".final_layernorm.", ".shared_head.norm.")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight", name)
    return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight" if match else ""


def convert(source: Path, case: str, path: Path, *, num_draft_layers: int = 0, **metadata: Any) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers + num_draft_layers)
    tensors = {
        _draft_name(new) or names.get_name(new, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(changed)
        for name, values in stacked_experts(load_file(source / "model.safetensors")).items()
        for new, changed in conversion.tensors(name, values, config)
    }
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    if config.rope_scaling is not None:
        written |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling["factor"]}
    architecture = conversion.name or gguf.MODEL_ARCH_NAMES[conversion.arch]
    return write_gguf(path, written, tensors, architecture=architecture)


@pytest.mark.parametrize("case", CONVERSIONS)
def test_gguf_of_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    model = load(convert(original.path, case, tmp_path / "m.gguf"))
    (logits,) = Driver(model).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CONVERSIONS if case not in AS_ANOTHER])
def test_gguf_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert round_scale(got.experts) == round_scale(expected.experts)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "rms_norm_eps": 0.0, "experts": None, "in_bfloat16": True}
    assert replace(got, **not_said) == replace(expected, **not_said)


@pytest.mark.parametrize("case", AS_ANOTHER)
def test_gguf_of_an_architecture_of_two_types_is_read_as_one(case, tiny, tmp_path):
    assert open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config.model_type == AS_ANOTHER[case]


@pytest.mark.parametrize("case", ["glm4_moe", "glm4_moe_lite", "hy_v3"])
def test_gguf_blocks_that_draft_are_left_out(case, load, tmp_path):
    headed, ids = make_headed(case, tmp_path / "model"), random_ids(40, seed=9)
    added = {"block_count": 4, "nextn_predict_layers": 1}
    path = convert(headed.path, case, tmp_path / "m.gguf", num_draft_layers=1, **added)
    with torch.no_grad():
        expected = headed.oracle(torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("mixtral", {"expert_count": 5}, "one part for each expert"),
        ("mixtral", {"expert_used_count": 7}, "num_experts_per_tok"),
        ("minimax_m2", {"expert_gating_func": 1}, "gating function 1"),
        ("minimax_m2", {"rope.dimension_count": 17}, "rotated"),
        ("glm4_moe", {"expert_gating_func": 1}, "gating function 1"),
        ("glm4_moe", {"nextn_predict_layers": 3}, "3 of 3 blocks"),
        ("glm4_moe", {"expert_group_count": 5}, "n_group"),
        ("glm4_moe_lite", {"nextn_predict_layers": True}, "nextn_predict_layers is True of 3 blocks"),
        ("hy_v3", {"expert_weights_norm": False}, "do not sum to 1"),
        ("hy_v3", {"expert_shared_feed_forward_length": 25}, "no multiple of 24"),
        ("dots1-gguf", {"attention.sliding_window": 6}, "sliding_window"),
        ("ernie4_5_moe-gguf", {"expert_weights_scale": 2.0}, "expert_weights_scale"),
    ],
)
def test_gguf_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)
