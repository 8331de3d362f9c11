"""Random LoRA adapters in PEFT's format, for tests and experiments without a trained one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from forebay.formats.adapters import WEIGHTS_NAME, Shape
from forebay.formats.safetensors import ADAPTER_NAME
from forebay.formats.safetensors_writer import Entry, write_safetensors

SIZE: Final = 0.1  # of what is added to an output, where the inputs of a layer have the variance 1


def write_random_adapter(folder: Path, layers: Mapping[str, Shape], *, rank: int, seed: int) -> None:
    """Write an adapter of these layers, by their names in a checkpoint, into `folder`, which it makes. The same seed
    gives the same files."""
    shapes: dict[str, Shape] = {}
    for layer, (outputs, inputs) in sorted(layers.items()):
        shapes[f"base_model.model.{layer}.lora_A.weight"] = rank, inputs
        shapes[f"base_model.model.{layer}.lora_B.weight"] = outputs, rank
    generator = np.random.default_rng(seed)

    def values() -> Iterator[bytes]:
        for name, shape in shapes.items():
            size = SIZE if ".lora_B." in name else 1.0
            numbers = generator.standard_normal(shape, dtype=np.float32) * np.float32(size / shape[1] ** 0.5)
            yield numbers.tobytes()

    folder.mkdir(parents=True)
    with (folder / WEIGHTS_NAME).open("xb") as file:
        write_safetensors(file, {name: Entry("F32", shape) for name, shape in shapes.items()}, values())
    (folder / ADAPTER_NAME).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
