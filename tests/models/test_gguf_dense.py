"""GGUF files of dense models and their mixtures give the logits of the model they were made from."""

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
from forebay.families.config.transformer import FULL, SLIDING
from forebay.layers.rotary import inverse_frequencies
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import _interleave as interleave
from tests.models.test_gguf import stacked_experts
from tests.models.test_gguf_mamba import granite_scales
from tests.models.test_gguf_window import common_metadata, expert_metadata
from tests.models.tiny import random_ids

ARCH = gguf.MODEL_ARCH
Named = Iterator[tuple[str, np.ndarray]]
Tensors = dict[str, np.ndarray]


def no_extra(tensors: Tensors) -> dict[str, Any]:
    return {}


class Conversion(NamedTuple):
    """What llama.cpp's converter does to a family's tensors, and writes of its configuration besides the common.
    `interleaved`: rotary pairs of q and k become neighbours. `extra`: metadata made of tensors, which are left out."""

    arch: gguf.MODEL_ARCH
    metadata: Callable[[ModelConfig], dict[str, Any]]
    interleaved: bool = False
    extra: Callable[[Tensors], dict[str, Any]] = no_extra
    name: str = ""  # of the architecture, if the package has another one's names


def nothing(config: ModelConfig) -> dict[str, Any]:
    return {}


def apertus_numbers(tensors: Tensors) -> dict[str, Any]:
    """Take the four numbers of each layer's activation out of the tensors: a list for each."""
    layers = range(sum(name.endswith("act_fn.eps") for name in tensors))
    return {
        f"xielu.{key}": [tensors.pop(f"model.layers.{layer}.mlp.act_fn.{key}").item() for layer in layers]
        for key in ("alpha_p", "alpha_n", "beta", "eps")
    }


def window(config: ModelConfig) -> dict[str, Any]:
    if not config.sliding_window:
        return {}
    flags = [kind == SLIDING for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": flags}


def yarn(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "yarn":
        return {}
    written = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": int(scaling["original_max_position_embeddings"]),
        **{f"rope.scaling.yarn_{key}": scaling[name] for name, key in written.items() if name in scaling},
    }


def olmo3(config: ModelConfig) -> dict[str, Any]:
    return {**window(config), **yarn(config), "rope.freq_base_swa": config.ropes[SLIDING][0]}


def granite(config: ModelConfig) -> dict[str, Any]:
    return {**granite_scales(config), "vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}


def granite4(config: ModelConfig) -> dict[str, Any]:
    """Of a Granite 4 model of attention alone: its file has metadata of mixers and experts, and a list of KV heads."""
    sizes = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    return {
        **granite(config),
        **{f"ssm.{key}": 4 for key in sizes},
        "attention.head_count_kv": [config.num_kv_heads] * config.num_layers,
        "rope.scaling.finetuned": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def granite_moe(config: ModelConfig) -> dict[str, Any]:
    counts = {key: value for key, value in expert_metadata(config).items() if key != "expert_feed_forward_length"}
    shared = config.shared_intermediate_size
    return {**granite(config), **counts, **({"expert_shared_feed_forward_length": shared} if shared else {})}


def granite_swa(config: ModelConfig) -> dict[str, Any]:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": (config.rope_scaling or {}).get("factor")}
    return {
        **(granite_moe(config) if config.experts else granite(config)),
        **(linear if config.rope_scaling else {}),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "attention.rope_pattern": [int(theta > 0) for theta in config.rope_thetas],
    }


def exaone_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return {
        **window(config),
        **expert_metadata(config),
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        "expert_shared_feed_forward_length": experts.shared_size,
        "expert_weights_scale": experts.scale,
        "expert_weights_norm": experts.normalize,
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.best_groups,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "nextn_predict_layers": 0,
        "rope.scaling.type": "none",
    }


def hunyuan_moe(config: ModelConfig) -> dict[str, Any]:
    shared = {"expert_shared_count": 1, "expert_shared_feed_forward_length": config.intermediate_size}
    return {**expert_metadata(config), **shared, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def arcee(config: ModelConfig) -> dict[str, Any]:
    return {**yarn(config), "vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}


CONVERSIONS = {
    "olmo3": Conversion(ARCH.OLMO2, olmo3),
    "granite": Conversion(ARCH.GRANITE, granite, interleaved=True),
    "granite-biases-tied-scaled": Conversion(ARCH.GRANITE, granite4, interleaved=True),
    "granitemoe": Conversion(ARCH.GRANITE_MOE, granite_moe, interleaved=True),
    "granitemoeshared": Conversion(ARCH.GRANITE_MOE, granite_moe, interleaved=True),
    "granite_swa": Conversion(ARCH.GRANITE, granite_swa, interleaved=True, name="granite_swa"),
    "granitemoe_swa-shared-biases-tied": Conversion(
        ARCH.GRANITE_MOE, granite_swa, interleaved=True, name="granite_swa"
    ),
    "apertus": Conversion(ARCH.APERTUS, nothing, extra=apertus_numbers),
    "exaone": Conversion(ARCH.EXAONE, nothing),
    "exaone4": Conversion(ARCH.EXAONE4, window),
    "exaone4-no-window-tied": Conversion(ARCH.EXAONE4, window),
    "exaone_moe": Conversion(ARCH.EXAONE_MOE, exaone_moe),
    "hunyuan_v1_dense": Conversion(ARCH.HUNYUAN_DENSE, nothing),
    "hunyuan_v1_moe": Conversion(ARCH.HUNYUAN_MOE, hunyuan_moe),
    "seed_oss": Conversion(ARCH.SEED_OSS, nothing),
    "internlm3": Conversion(ARCH.LLAMA, nothing, interleaved=True),
    "arcee": Conversion(ARCH.ARCEE, arcee, interleaved=True),
    "arcee-biases-tied": Conversion(ARCH.ARCEE, arcee, interleaved=True),
}


PARTED = {"block_sparse_moe": "ffn_{}_exps", "shared_mlp": "ffn_{}_shexp"}


SWASH = {
    "self_attn.sinks": "attn_sinks",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
}


def _of_granite_swa(name: str) -> str:
    """Return GGUF's name of what Granite does not have."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"blk.{found[1]}.{SWASH[found[2]]}.weight" if found and found[2] in SWASH else ""


def converted(config: ModelConfig, conversion: Conversion, name: str, values: np.ndarray) -> Named:
    """Joined gates and ups are parted, under GGUF's names, and q and k permuted where the architecture wants it."""
    head = re.search(r"\.(q|k)_proj\.", name)
    if conversion.name and (own := _of_granite_swa(name)):
        yield own, values
    elif joined := re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.input_linear\.weight", name):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"blk.{joined[1]}.{PARTED[joined[2]].format(part)}.weight", half
    elif conversion.interleaved and head:
        yield name, interleave(values, config.num_heads if head[1] == "q" else config.num_kv_heads)
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def convert(
    source: Path, case: str, path: Path, *, added: dict[str, np.ndarray] | None = None, **metadata: Any
) -> Path:
    """As llama.cpp's converter does it, with names from the gguf package's own table."""
    conversion, config = CONVERSIONS[case], open_checkpoint(source).config
    names = gguf.get_tensor_name_map(conversion.arch, config.num_layers)
    stored = stacked_experts(load_file(source / "model.safetensors"))
    extra = conversion.extra(stored)
    tensors = {
        named(names, new): np.ascontiguousarray(changed)
        for name, values in stored.items()
        for new, changed in converted(config, conversion, name, values)
    }
    if (config.rope_scaling or {}).get("rope_type") == "llama3":
        rope = {"head_dim": config.head_dim, "theta": config.rope_theta}
        plain, _ = inverse_frequencies(**rope, scaling=None)
        scaled, _ = inverse_frequencies(**rope, scaling=config.rope_scaling)
        tensors["rope_freqs.weight"] = (plain / scaled).numpy()
    written = {**common_metadata(config), **conversion.metadata(config), **metadata}
    written = {key: value for key, value in written.items() if value is not None}
    architecture = conversion.name or gguf.MODEL_ARCH_NAMES[conversion.arch]
    return write_gguf(path, written, tensors | (added or {}), architecture=architecture, extra=extra)


def named(names: gguf.TensorNameMap, name: str) -> str:
    found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@pytest.mark.parametrize("case", CONVERSIONS)
def test_a_converted_model_gives_the_logits_of_the_original(case, tiny, load, tmp_path):
    original, ids = tiny(case), random_ids(40, seed=8)
    path = convert(original.path, case, tmp_path / "m.gguf")
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "case", ["olmo3", "exaone4-no-window-tied", "exaone_moe", "hunyuan_v1_moe", "seed_oss", "arcee"]
)
def test_the_metadata_say_what_the_configuration_said(case, tiny, tmp_path):
    expected = open_checkpoint(tiny(case).path).config
    got = open_checkpoint(convert(tiny(case).path, case, tmp_path / "m.gguf")).config
    assert got.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert got.rope_theta == pytest.approx(expected.rope_theta)
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True, "rms_norm_eps": 0.0, "rope_theta": 0.0}
    said = {"rope_scaling": _without_mscale(expected)}
    assert replace(got, rms_norm_eps=0.0, rope_theta=0.0) == replace(expected, **not_said, **said)


def _without_mscale(config: ModelConfig) -> dict[str, Any] | None:
    """YaRN's `mscale` has no effect alone, and no key."""
    scaling = config.rope_scaling
    return None if scaling is None else {key: value for key, value in scaling.items() if key != "mscale"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [SLIDING] * 3),
        (2, [SLIDING, FULL, SLIDING]),
        ([False, True, False], [FULL, SLIDING, FULL]),
    ],
)
def test_windows_follow_the_file_s_pattern(pattern, expected, tiny, tmp_path):
    path = convert(tiny("olmo3").path, "olmo3", tmp_path / "m.gguf", **{"attention.sliding_window_pattern": pattern})
    config = open_checkpoint(path).config
    assert (config.model_type, list(config.layer_types)) == ("olmo3", expected)


def test_blocks_that_draft_are_left_out(tiny, load, tmp_path):
    """K-EXAONE's files have them behind the model's layers, and their number is part of `block_count`."""
    case, ids = "exaone_moe", random_ids(40, seed=8)
    original = tiny(case)
    size = open_checkpoint(original.path).config.hidden_size
    zeros = np.zeros((size, size), np.float32)
    draft = {"blk.3.nextn.eh_proj.weight": zeros, "blk.3.attn_q.weight": zeros, "blk.3.nextn.enorm.weight": zeros[0]}
    path = convert(original.path, case, tmp_path / "m.gguf", added=draft, block_count=4, nextn_predict_layers=1)
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, original.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("olmo3", {"attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
        ("olmo3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("olmo3", {"attention.sliding_window_pattern": ["a", "b", "c"]}, "sliding_window_pattern"),
        ("granite", {"rope.scaling.finetuned": False}, "rotary"),
        ("granite", {"expert_count": 2}, "experts"),
        ("granite", {"attention.head_count_kv": ["two"]}, "num_key_value_heads"),
        ("granitemoe", {"expert_count": 5}, "one part for each expert"),
        ("granitemoe", {"expert_weights_scale": 2.0}, "expert_weights_scale"),
        ("granite_swa", {"attention.rope_pattern": [1, 0]}, "rope_pattern"),
        ("granite_swa", {"attention.rope_pattern": [1, 0, 2]}, "rope_pattern"),
        ("granite_swa", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("exaone_moe", {"expert_gating_func": 1}, "gating function 1"),
        ("exaone_moe", {"nextn_predict_layers": 3}, "3 of 3 blocks"),
        ("hunyuan_v1_moe", {"expert_feed_forward_length": 25}, "moe_intermediate_size"),
        ("hunyuan_v1_moe", {"expert_shared_count": 2}, "num_shared_expert"),
    ],
)
def test_metadata_that_are_not_honoured_are_refused(case, metadata, message, tiny, tmp_path):
    path = convert(tiny(case).path, case, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(path)
