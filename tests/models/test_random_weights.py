"""Small random models: of every type, sane, and what transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from forebay import models
from forebay.backends import make_ops
from forebay.families import TEXT_ENCODERS, TYPES
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.families.small_pictures import SMALL, WITH_PICTURES
from forebay.formats.safetensors import SINGLE_NAME
from forebay.models.encoder import load_encoder
from forebay.models.random_weights import random_tensor, write_random_weights
from tests.models.drive import Driver
from tests.models.tiny import VOCAB, by_tier, random_ids
from tests.models.visual import oracle_features


def make(
    folder: Path,
    model_type: str,
    *,
    hidden_size: int = 64,
    num_layers: int = 4,
    seed: int = 0,
    draft_head: bool = False,
    **fields,
) -> Path:
    config = small_config(model_type, hidden_size=hidden_size, num_layers=num_layers, vocab_size=VOCAB)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**config, **ids, "dtype": "float32", **fields}))
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    kind = {"dtype": "float32", "seed": seed, "draft_head": draft_head}
    write_random_weights(config_from_folder(folder), path, **kind, progress=lambda *_: None)
    return folder


@pytest.mark.parametrize("model_type", by_tier(TYPES))
def test_transformers_gives_the_same_logits_for_the_same_folder(model_type, load, tmp_path):
    path, ids = make(tmp_path, model_type), random_ids(40, seed=1)
    oracle = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert 0.05 < logits.std() < 20


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "gemma4_unified")) for name in WITH_PICTURES],
)
def test_transformers_gives_the_same_logits_and_encodings_for_the_same_folder(model_type, ops, load, tmp_path):
    path, ids = make(tmp_path, model_type), random_ids(40, seed=1)
    for name, fields in SMALL[model_type].files.items():
        (path / name).write_text(json.dumps(fields))
    oracle = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tile = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(1)).byte()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    (features,) = oracle_features(oracle, [tile.numpy()])
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    checkpoint = open_checkpoint(path)
    encoder = load_encoder(checkpoint, ops=ops, dtype=torch.float32, progress=lambda *_: None)
    encoding = encoder.finish(encoder.layers(encoder.begin(tile), 0, encoder.num_layers))
    torch.testing.assert_close(encoding, features, rtol=0, atol=1e-4)
    assert 0.05 < encoding.std() < 20


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_5_text", "mtp.layers.0.self_attn.q_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("nemotron_h", "mtp.layers.1.final_layernorm.weight"),
        ("deepseek_v3", "model.layers.4.eh_proj.weight"),
        ("bailing_hybrid", "model.layers.4.attention.dense.weight"),
        ("glm4_moe", "model.layers.4.shared_head.norm.weight"),
        ("hy_v3", "model.layers.4.final_layernorm.weight"),
    ],
)
def test_a_draft_head_has_the_names_of_published_files(model_type, name, tmp_path):
    path = make(tmp_path, model_type, draft_head=True, num_nextn_predict_layers=1)
    assert name in load_file(path / "model.safetensors")
    checkpoint = open_checkpoint(path, draft_head=True)
    model = models.load(checkpoint, ops=make_ops("torch", 1), dtype=torch.float32, draft_head=True)
    assert model.weight_bytes == checkpoint.num_bytes


@pytest.mark.parametrize("model_type", by_tier(TYPES))
@pytest.mark.parametrize(("hidden_size", "num_layers"), [(32, 1), (512, 7)])
def test_widths_and_depths_may_vary(model_type, hidden_size, num_layers, tmp_path):
    config = small_config(model_type, hidden_size=hidden_size, num_layers=num_layers, vocab_size=VOCAB)
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = config_from_folder(tmp_path)
    assert parsed.num_layers == num_layers
    assert models.describe(parsed).embedding.shape == (VOCAB, hidden_size)


def test_the_same_seed_gives_the_same_file(tmp_path):
    path = make(tmp_path, "falcon_h1") / "model.safetensors"
    first = path.read_bytes()
    make(tmp_path, "falcon_h1")
    assert path.read_bytes() == first
    make(tmp_path, "falcon_h1", seed=1)
    assert path.read_bytes() != first


def test_norms_stored_as_differences_from_one_are_small():
    generator = torch.Generator().manual_seed(0)
    stored = random_tensor("model.layers.0.input_layernorm.weight", (400,), generator, offset=1.0)
    plain = random_tensor("model.layers.0.input_layernorm.weight", (400,), generator, offset=0.0)
    assert abs(float(stored.mean())) < 0.05
    assert abs(float(plain.mean()) - 1) < 0.05


def test_time_steps_and_decays_are_those_that_mamba_starts_with():
    generator = torch.Generator().manual_seed(0)
    steps = torch.nn.functional.softplus(random_tensor("mamba.dt_bias", (400,), generator, offset=0.0))
    decays = random_tensor("mamba.A_log", (400,), generator, offset=0.0).exp()
    assert 0.001 <= float(steps.min()) < 0.01 < float(steps.max()) <= 0.1 + 1e-6
    assert 1 <= float(decays.min()) < 2 < 15 < float(decays.max()) <= 16


def test_progress_counts_the_bytes_written(tmp_path):
    make(tmp_path, "lfm2")
    config, seen = config_from_folder(tmp_path), []
    write_random_weights(config, tmp_path / "w", dtype="bfloat16", seed=0, progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (open_checkpoint(tmp_path).num_bytes // 2,) * 2


@pytest.mark.whole
@pytest.mark.parametrize("model_type", TEXT_ENCODERS)
def test_small_text_encoder_has_the_weights_that_its_type_needs(model_type: str, tmp_path: Path) -> None:
    fields = small_config(model_type, hidden_size=64, num_layers=2, vocab_size=40)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_from_folder(tmp_path)
    assert (config.model_type, config.unknown_options) == (model_type, ())
    write_random_weights(config, tmp_path / SINGLE_NAME, dtype="float32", seed=1, progress=lambda done, total: None)
    model = models.load(open_checkpoint(tmp_path), ops=make_ops("torch", 1), dtype=torch.float32)
    assert not model.generates
    assert model.cache_specs() == ()
