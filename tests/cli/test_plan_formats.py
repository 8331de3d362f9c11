"""What the weights of published checkpoints take, in the codes that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families import TYPES
from forebay.families.config.model_config import config_of
from forebay.families.small import small_config
from forebay.formats.quantization import Quantization
from forebay.formats.weight_shapes import ValueBytes
from forebay.models import needs_of
from tests.cli.public_configs import GPT_OSS_20B, GPT_OSS_20B_BYTES, LLAMA_3_8B, QWEN3_30B_A3B

pytestmark = pytest.mark.usefixtures("decides_for_avx2")

_NEAR: Final = 0.03
# Of the files of each format, bits of a weight, with the scales.
_BITS: Final = {
    "fp8": 8 + 32 / 128**2,
    "nvfp4": 4 + 8 / 16,
    "gptq": 4 + (16 + 4) / 128,
}
_FP8: Final = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
_CONFIGS: Final = {
    "fp8": _FP8,
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
}


def planned(folder: Path, fields: dict[str, Any], quantization: Quantization = Quantization.FILE) -> int:
    """Bytes of the weights, by a config.json alone."""
    (folder / "config.json").write_text(json.dumps(fields))
    return read_shape(folder, draft_head=False).weights.held_bytes(quantization, ValueBytes(2, 2))


def test_gpt_oss_takes_what_its_files_take(tmp_path: Path) -> None:
    held = planned(tmp_path, GPT_OSS_20B)
    assert held <= 14 * 2**30
    assert abs(held - GPT_OSS_20B_BYTES) <= _NEAR * GPT_OSS_20B_BYTES
    plain = {name: value for name, value in GPT_OSS_20B.items() if name != "quantization_config"}
    assert planned(tmp_path, plain) > 35 * 2**30


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", _BITS)
@pytest.mark.parametrize("fields", [LLAMA_3_8B, QWEN3_30B_A3B], ids=lambda fields: fields["model_type"])
def test_linear_layers_and_experts_take_what_files_of_a_format_take(
    form: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(fields)
    in_files = 0.0
    for param in needs_of(config).params:
        plain = param.min_bits > 4 or len(param.shape) != 2
        in_files += param.num_elements * (16 if plain else _BITS[form]) / 8
    held = planned(tmp_path, fields | {"quantization_config": _CONFIGS[form]})
    assert abs(held - in_files) <= _NEAR * in_files


def small(model_type: str) -> dict[str, Any]:
    return small_config(model_type, hidden_size=64, num_layers=4, vocab_size=64)


WITH_EXPERTS: Final = [model_type for model_type in TYPES if config_of(small(model_type)).num_experts]


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
@pytest.mark.parametrize("quantization", [Quantization.INT4, Quantization.INT8])
def test_experts_of_every_family_are_held_in_codes(model_type: str, quantization: Quantization, tmp_path: Path) -> None:
    fields = small(model_type)
    params = needs_of(config_of(fields)).params
    experts = [param for param in params if ".experts." in param.names[0] and len(param.shape) > 1]
    assert experts
    assert all(len(param.inner) == 1 and param.min_bits == 4 and param.inner[0] % 32 == 0 for param in experts)
    bits = {Quantization.INT4: 5, Quantization.INT8: 8.5}[quantization]
    spared = sum(param.num_elements for param in experts) * (16 - bits) / 8
    whole, held = (planned(tmp_path, fields, each) for each in (Quantization.NONE, quantization))
    assert whole - held >= spared
