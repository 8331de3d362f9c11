"""Shapes that no case has: as near to transformers as that is to itself in float64, and the same bits however cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import models
from forebay.families import TYPES
from forebay.families.checkpoint import open_checkpoint
from forebay.families.small import small_config
from tests.models.drive import Driver
from tests.models.tiny import VOCAB, Tiny, by_tier, make_random, random_ids

TOLERANCE = 1.5e-4
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTH = 45


def random_shape(model_type: str, rng: random.Random) -> dict[str, Any]:
    """A small configuration of the type, and sizes of it that depend on nothing else at random."""
    hidden_size, num_layers = 32 * rng.randint(1, 4), rng.randint(2, 6)
    fields = small_config(model_type, hidden_size=hidden_size, num_layers=num_layers, vocab_size=VOCAB)
    own: dict[str, list[Any]] = {
        "intermediate_size": [hidden_size // 2, 40, 72],
        "moe_intermediate_size": [8, 20, 36],
        "shared_expert_intermediate_size": [12, 28],
        "shared_intermediate_size": [24, 60],
        "mamba_d_state": [8, 24],
        "mamba_d_conv": [2, 3],
        "ssm_state_size": [8, 24],
        "state_size": [4, 12],
        "linear_key_head_dim": [8, 20],
        "linear_conv_kernel_dim": [2, 3],
        "kv_lora_rank": [12, 40],
        "q_lora_rank": [12, 40],
        "v_head_dim": [10, 24],
        "qk_nope_head_dim": [6, 20],
        "sliding_window": [3, 11, 30],
        "adapter_rank": [3, 9],
        "conv_L_cache": [2, 5],
    }
    drawn = {name: rng.choice(values) for name, values in own.items() if name in fields}
    if model_type in ("mamba", "falcon_mamba"):
        drawn.pop("intermediate_size")  # transformers computes it
    if model_type == "olmo_hybrid":  # transformers writes the convolutions of q, k and v as equal thirds of one
        drawn["linear_value_head_dim"] = drawn["linear_key_head_dim"]
    if model_type not in ("lfm3", "gemma4_text", "mellum"):  # which have a rope for each kind of attention
        drawn["rope_theta"] = rng.choice([500.0, 3e5])
    return {**fields, **drawn}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("model_type", by_tier(TYPES))
def test_any_shape_agrees_with_transformers_and_with_itself(model_type, seed, tmp_path, native):
    rng = random.Random(f"{model_type} {seed}")
    tiny = _saved(model_type, random_shape(model_type, rng), tmp_path, seed)
    model = models.load(open_checkpoint(tmp_path), ops=native, dtype=torch.float32)
    ids = random_ids(LENGTH, seed)
    (whole,) = Driver(model).step([(1, ids)])
    expected = tiny.logits(ids)
    error = float((whole - expected).abs().max())
    # Some shapes have larger numbers, such as Zamba2's without a residual around its shared blocks.
    assert error < TOLERANCE or error < 4 * tiny.own_error(ids), error
    for page_size in (1, 16):
        driver, parts = Driver(model, page_size=page_size), []
        while driver.lens[1] < LENGTH:
            first = driver.lens[1]
            parts.append(driver.step([(1, ids[first : first + rng.randint(1, 12)])])[0])
        assert torch.equal(torch.cat(parts), whole)


def _saved(model_type: str, fields: dict[str, Any], folder: Path, seed: int) -> Tiny:
    own = {name: value for name, value in fields.items() if name != "model_type"} | TOKENS
    model = make_random(model_type, own, seed=seed)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == model_type
    return Tiny(folder, model)
