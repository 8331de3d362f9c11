"""GGUF files of models with LayerNorm, capped scores or windows of their own give the logits of the original."""

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
from forebay.families.deepseek_v2.config import LatentConfig
from forebay.families.gemma2.config import Gemma2Config
from forebay.families.mimo_v2_flash.config import MimoConfig
from forebay.families.stablelm.config import StableLmConfig
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_delta import deepseek_metadata, expert_metadata, latent_tensors, round_scale
from tests.models.test_gguf_window import common_metadata, gemma3_tensors
from tests.models.tiny import random_ids

Named = Iterator[tuple[str, np.ndarray]]


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration besides the common."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[str, np.ndarray, Any], Named]
    metadata: Callable[[Any], dict[str, Any]]


def as_they_are(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    yield name, values


def gemma2_metadata(config: Gemma2Config) -> dict[str, Any]:
    """The converter writes no base of the rope."""
    return {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.scores_cap,
        "final_logit_softcapping": config.logits_cap,
        "rope.freq_base": None,
    }


def layer_norm_metadata(config: ModelConfig) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": config.rms_norm_eps, "attention.layer_norm_rms_epsilon": None}


def cohere_metadata(config: Any) -> dict[str, Any]:
    return {**layer_norm_metadata(config), "logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def cohere2_metadata(config: Any) -> dict[str, Any]:
    sizes = {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    return {**cohere_metadata(config), **sizes, "attention.sliding_window": config.sliding_window}


def deepseek_v2_metadata(config: LatentConfig) -> dict[str, Any]:
    return {**deepseek_metadata(config), "expert_gating_func": 1}


def mimo_tensors(name: str, values: np.ndarray, config: MimoConfig) -> Named:
    name = f"{name}.weight" if name.endswith("attention_sink_bias") else name
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def mimo_metadata(config: MimoConfig) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        **expert_metadata(config),
        "attention.head_count_kv": [config.num_kv_heads * (1 + double) for double in windowed],
        "attention.value_length": config.value_dim,
        "attention.value_scale": config.value_scale,
        "attention.sliding_window": config.sliding_window - 1,  # what published files call sliding_window
        "attention.sliding_window_pattern": windowed,
        "rope.dimension_count": config.ropes["full_attention"].dim,
        "rope.freq_base_swa": config.ropes["sliding_attention"].theta,
        "expert_gating_func": 2,
        "expert_group_count": config.experts.groups,
        "expert_group_used_count": config.experts.best_groups,
        "nextn_predict_layers": 0,
    }


def stacked_heads(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with one of all heads of a layer instead of one for each, which `norms` have."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*)\.norms\.(\d+)\.weight", name):
            stacks.setdefault(f"{match[1]}.weight", {})[int(match[2])] = values
    others = {name: values for name, values in tensors.items() if ".norms." not in name}
    return others | {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}


def stablelm_metadata(config: StableLmConfig) -> dict[str, Any]:
    """The converter writes no head size."""
    return {
        **layer_norm_metadata(config),
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.dimension_count": config.rotary_dim,
        "use_parallel_residual": config.parallel,
    }


def gemma2_tensors(name: str, values: np.ndarray, config: ModelConfig) -> Named:
    yield from gemma3_tensors(name, values)


CONVERSIONS = {
    "gemma2-gguf": Conversion(gguf.MODEL_ARCH.GEMMA2, gemma2_tensors, gemma2_metadata),
    "gemma": Conversion(gguf.MODEL_ARCH.GEMMA, gemma2_tensors, lambda config: {"rope.freq_base": None}),
    "cohere": Conversion(gguf.MODEL_ARCH.COMMAND_R, as_they_are, cohere_metadata),
    "cohere2-gguf": Conversion(gguf.MODEL_ARCH.COHERE2, as_they_are, cohere2_metadata),
    "stablelm": Conversion(gguf.MODEL_ARCH.STABLELM, as_they_are, stablelm_metadata),
    "stablelm-parallel-qk-norm-biases-tied": Conversion(gguf.MODEL_ARCH.STABLELM, as_they_are, stablelm_metadata),
    "starcoder2-no-window": Conversion(gguf.MODEL_ARCH.STARCODER2, as_they_are, layer_norm_metadata),
    "starcoder2-no-biases-untied": Conversion(gguf.MODEL_ARCH.STARCODER2, as_they_are, layer_norm_metadata),
    "deepseek_v2": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, latent_tensors, deepseek_v2_metadata),
    "deepseek_v2-lite": Conversion(gguf.MODEL_ARCH.DEEPSEEK2, latent_tensors, deepseek_v2_metadata),
    "mimo_v2_flash-pattern": Conversion(gguf.MODEL_ARCH.MIMO2, mimo_tensors, mimo_metadata),
}


def convert(source: Path, case: str, path: Path, more: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table. None as a value: not written."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers)
    tensors = {
        names.get_name(new, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(changed)
        for name, values in stacked_heads(stacked_experts(load_file(source / "model.safetensors"))).items()
        for new, changed in conversion.tensors(name, values, config)
    }
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    there = {key: value for key, value in written.items() if value is not None}
    return write_gguf(path, there, {**tensors, **(more or {})}, architecture=gguf.MODEL_ARCH_NAMES[conversion.arch])


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
    if isinstance(got, MimoConfig):
        assert got.value_scale == pytest.approx(expected.value_scale)
        not_said["value_scale"] = 0.0
    assert replace(got, **not_said) == replace(expected, **not_said)


def test_deepseek_v2_files_of_before_the_gating_function_was_written_are_read(tiny, tmp_path):
    path = convert(tiny("deepseek_v2").path, "deepseek_v2", tmp_path / "m.gguf", expert_gating_func=None)
    assert open_checkpoint(path).config.model_type == "deepseek_v2"


def test_blocks_of_mimo_that_draft_are_left_out(tiny, load, tmp_path):
    case = "mimo_v2_flash-pattern"
    original, ids = tiny(case), random_ids(20, seed=8)
    config = open_checkpoint(original.path).config
    drafts = {"nextn.eh_proj": (48, 96), "nextn.enorm": (48,), "attn_norm": (48,), "attn_q": (96, 48)}
    more = {f"blk.7.{name}.weight": np.ones(shape, dtype=np.float32) for name, shape in drafts.items()}
    lists = mimo_metadata(config)
    counts = {
        "block_count": 8,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [*lists["attention.head_count_kv"], 4],
        "attention.sliding_window_pattern": [*lists["attention.sliding_window_pattern"], True],
    }
    (logits,) = Driver(load(convert(original.path, case, tmp_path / "m.gguf", more, **counts))).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("gemma2-gguf", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ("gemma2-gguf", {"attention.sliding_window": 0}, "sliding_window"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale"),
        ("cohere2-gguf", {"rope.dimension_count": 6}, "head size"),
        ("stablelm", {"rope.dimension_count": 17}, "17 rotated dimensions of 16"),
        ("stablelm", {"attention.key_length": 8}, "divisor of hidden_size"),
        ("deepseek_v2", {"expert_gating_func": 2}, "e_score_correction_bias"),
        ("deepseek_v2", {"expert_weights_norm": True}, "norm_topk_prob"),
        ("deepseek_v2", {"expert_group_count": 3}, "n_group"),
        ("mimo_v2_flash-pattern", {"expert_gating_func": 1}, "gating function 1"),
        ("mimo_v2_flash-pattern", {"attention.value_scale": None}, "value_scale"),
        ("mimo_v2_flash-pattern", {"attention.head_count_kv": [2] * 7}, "twice"),
        ("mimo_v2_flash-pattern", {"attention.head_count_kv": 2}, "head_count_kv"),
        ("mimo_v2_flash-pattern", {"attention.sliding_window_pattern": [True] * 3}, "sliding_window_pattern"),
        ("mimo_v2_flash-pattern", {"nextn_predict_layers": 7}, "nextn_predict_layers is 7 of 7 blocks"),
        ("mimo_v2_flash-pattern", {"block_count": 1 << 20}, "block_count"),
        ("mimo_v2_flash-pattern", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "scaled rope"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, load, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(path)
