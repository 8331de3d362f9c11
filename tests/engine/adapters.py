"""Adapters for tests: random ones in PEFT's form, and the checkpoint that has one merged into its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LAYERS = (".self_attn.q_proj", ".self_attn.v_proj", ".self_attn.o_proj", ".mlp.gate_proj", ".mlp.down_proj")


def make_adapter(model: Path, folder: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, size: float = 0.3) -> Path:
    """Write a random adapter of five layers of each block of `model`, a folder of one safetensors file."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(_LAYERS):
            outputs, inputs = weight.shape
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"base_model.model.{layer}.lora_{part}.weight"
                tensors[key] = size * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint of `model` with the adapter in its weights."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, parts = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name in weights:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in parts:
            product = parts[f"{layer}.lora_B.weight"].double() @ parts[f"{layer}.lora_A.weight"].double()
            weights[name] = (weights[name].double() + scale * product).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors")
    return folder
