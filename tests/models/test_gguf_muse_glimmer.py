"""GGUF files of Muse Glimmer give the logits of the model they were made from."""

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
from forebay.families.muse_glimmer_text.config import MuseGlimmerConfig
from tests.formats.gguf_files import write_gguf
from tests.models.drive import Driver
from tests.models.test_gguf import _interleave as interleave
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import Tiny, make_oracle, random_ids

CASE = "muse_glimmer_text"
_OTHER = {"qk_scale_factor": 1.3, "sliding_window": 5, "tie_word_embeddings": True, "num_hidden_layers": 4}


@pytest.fixture(params=[{}, _OTHER], ids=["first", "tied"])
def original(request, tiny, tmp_path):
    if not request.param:
        return tiny(CASE)
    oracle = make_oracle(CASE, **request.param)
    oracle.save_pretrained(tmp_path / "folder")
    return Tiny(tmp_path / "folder", oracle)


def tensors_of(source: Path, config: MuseGlimmerConfig) -> dict[str, np.ndarray]:
    """As llama.cpp's converter does it, with names from the gguf package's tables of two other architectures."""
    others = [
        gguf.get_tensor_name_map(arch, config.num_layers) for arch in (gguf.MODEL_ARCH.GEMMA3, gguf.MODEL_ARCH.AFMOE)
    ]
    stored = {}
    for name, values in load_file(source / "model.safetensors").items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        changed = values + 1 if name.endswith("layernorm.weight") else values
        changed = interleave(changed, heads) if heads else changed
        names = (other.get_name(name, try_suffixes=(".weight",)) for other in others)
        stored[next(filter(None, names))] = np.ascontiguousarray(changed)
    for layer in range(config.num_layers):
        stored[f"blk.{layer}.attn_q_norm.weight"] = np.full(config.head_dim, config.query_factor, np.float32)
        stored[f"blk.{layer}.attn_k_norm.weight"] = np.ones(config.head_dim, np.float32)
    return stored


def metadata_of(config: MuseGlimmerConfig) -> dict[str, Any]:
    return {
        **common_metadata(config),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "final_logit_softcapping": config.logits_cap,
        "logit_scale": config.logits_factor,
    }


def convert(source: Path, path: Path, more: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """None as a value: not written."""
    config = open_checkpoint(source).config
    assert isinstance(config, MuseGlimmerConfig)
    kept = {key: value for key, value in {**metadata_of(config), **metadata}.items() if value is not None}
    return write_gguf(path, kept, {**tensors_of(source, config), **(more or {})}, architecture="muse-glimmer")


def test_converted_muse_glimmer_gives_the_logits_of_the_original(original, load, tmp_path):
    ids = random_ids(40, seed=8)
    (logits,) = Driver(load(convert(original.path, tmp_path / "m.gguf"))).step([(1, ids)])
    original.assert_agrees(logits, ids)


def test_metadata_of_muse_glimmer_say_what_the_configuration_said(original, tmp_path):
    expected = open_checkpoint(original.path).config
    got = open_checkpoint(convert(original.path, tmp_path / "m.gguf")).config
    numbers = {"rms_norm_eps": 0.0, "query_factor": 0.0, "logits_factor": 0.0}
    assert [getattr(got, name) for name in numbers] == pytest.approx([getattr(expected, name) for name in numbers])
    not_said = {"bos_token_id": None, "eos_token_ids": (), "in_bfloat16": True, **numbers}
    assert replace(got, **not_said) == replace(expected, **not_said)
    assert got.unknown_options == ()


def test_metadata_of_published_muse_glimmer_say_a_period_of_windows(tiny, tmp_path):
    written = {"attention.sliding_window_pattern": 4, "rope.freq_base_swa": 7_000.0, "final_logit_softcapping": 0.0}
    config = open_checkpoint(convert(tiny(CASE).path, tmp_path / "m.gguf", **written)).config
    assert isinstance(config, MuseGlimmerConfig)
    assert config.layer_types == (SLIDING, SLIDING, SLIDING, FULL, SLIDING)
    assert config.has_rope == (True, True, True, False, True)
    assert (config.rope_theta, config.logits_cap) == (7_000.0, 0.0)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"logit_scale": None}, "logit_scale is missing"),
        ({"logit_scale": 0.0}, "output_multiplier"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is missing"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"attention.sliding_window": None}, "attention.sliding_window is 'None'"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"rope.freq_base_swa": 0.0}, "rope_theta"),
        ({"attention.key_length": 24, "attention.value_length": 24}, "no vector of 24 F32 numbers"),
    ],
)
def test_hostile_metadata_of_muse_glimmer_are_named(metadata, named, tiny, tmp_path):
    with pytest.raises(ModelError, match=named):
        open_checkpoint(convert(tiny(CASE).path, tmp_path / "m.gguf", **metadata))


@pytest.mark.parametrize(
    ("norm", "value", "named"),
    [
        ("blk.1.attn_q_norm", np.linspace(1, 2, 12, dtype=np.float32), "attn_q_norm has 13 different weights"),
        ("blk.1.attn_q_norm", np.full(12, 2, np.float32), "attn_q_norm has 2 different weights"),
        ("blk.1.attn_q_norm", np.ones(12, np.float16), "blk.1.attn_q_norm.weight is no vector of 12 F32 numbers"),
        ("blk.2.attn_k_norm", np.full(12, 2, np.float32), "attn_k_norm has 2 different weights"),
    ],
)
def test_norms_of_muse_glimmer_that_are_no_factor_are_refused(norm, value, named, tiny, tmp_path):
    with pytest.raises(ModelError, match=named):
        open_checkpoint(convert(tiny(CASE).path, tmp_path / "m.gguf", {f"{norm}.weight": value}))
