"""A small adapter in PEFT's format, and the layers of the model that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from forebay.formats.adapters import WEIGHTS_NAME, Adapter, Shape, read_adapter
from forebay.formats.safetensors import ADAPTER_NAME

LAYERS: dict[str, Shape] = {
    "model.layers.0.self_attn.q_proj": (8, 6),
    "model.layers.0.mlp.down_proj": (6, 10),
    "model.layers.1.self_attn.q_proj": (8, 6),
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "some/base",
    "r": 4,
    "lora_alpha": 6,
    "bias": "none",
    "init_lora_weights": True,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def matrices(layers: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Random A and B of layers, by their ranks."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer, rank in layers.items():
        outputs, inputs = LAYERS[layer]
        tensors[f"base_model.model.{layer}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """Write an adapter of rank 4 for all layers, but for what is given. A field that is ... is left out."""
    folder.mkdir(exist_ok=True)
    fields = {name: value for name, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / ADAPTER_NAME).write_text(json.dumps(fields))
    save_file(dict(matrices(dict.fromkeys(LAYERS, 4)) if tensors is None else tensors), folder / WEIGHTS_NAME)
    return folder


def read(folder: Path, max_rank: int = 16) -> Adapter:
    return read_adapter(folder, layers=LAYERS, rename=str, max_rank=max_rank)
