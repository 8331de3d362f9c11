"""Layers in floats of 8 and 4 bits: the values that torch's own types and the formats' definitions give."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_of
from forebay.formats.quantization import Quantization
from forebay.formats.small_floats import E2M1, E4M3
from forebay.formats.stored_tensor import read_tensor
from forebay.ops import Ops
from tests.formats.coded import read
from tests.kernels import NATIVE
from tests.models.drive import Driver
from tests.models.tiny import make_oracle, random_ids

OUTPUTS, WIDTH = 200, 320  # one and a half blocks, two and a half
GATE = "model.layers.0.mlp.gate_proj"
Parts = dict[str, torch.Tensor]


def test_floats_of_8_bits_are_those_of_torch_to_the_bit():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(torch.from_numpy(E4M3), expected, rtol=0, atol=0, equal_nan=True)
    assert (torch.from_numpy(E4M3).signbit() == expected.signbit()).all()


def floats(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every float of 8 bits there is, but NaN."""
    codes = torch.randint(0, 254, shape, generator=torch.Generator().manual_seed(seed))
    return (codes + (codes > 126)).to(torch.uint8).view(torch.float8_e4m3fn)


def scales(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-4).to(dtype)


def fp8(scale_name: str, shape: tuple[int, ...], block: int = 0, dtype: torch.dtype = torch.float32):
    def made(seed: int, outputs: int = OUTPUTS, width: int = WIDTH) -> tuple[Parts, torch.Tensor]:
        weight = floats((outputs, width), seed)
        own = (-(-outputs // block), -(-width // block)) if block else tuple(outputs if n < 0 else n for n in shape)
        scale = scales(own, seed + 1, dtype)
        spread = scale.float() if block == 0 else scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread.reshape(-1, 1) if len(own) < 2 else spread[:outputs, :width]
        return {"weight": weight, scale_name: scale}, weight.float() * spread

    return made


def nvfp4(codes_name: str, of_all: str):
    def made(seed: int, outputs: int = OUTPUTS, width: int = WIDTH) -> tuple[Parts, torch.Tensor]:
        pairs = torch.randint(
            0, 256, (outputs, width // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        factors = floats((outputs, width // 16), seed + 1)
        multiplies = of_all == "weight_scale_2"
        scale = torch.tensor(2.0**-12 * 0.75 if multiplies else 2.0**12)
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).reshape(outputs, width).long()
        by_group = factors.float() * (scale if multiplies else 1 / scale)
        values = torch.from_numpy(E2M1)[codes] * by_group.repeat_interleave(16, 1)
        return {codes_name: pairs, "weight_scale": factors, of_all: scale.reshape(1)}, values

    return made


def mxfp4(seed: int, outputs: int = OUTPUTS, width: int = WIDTH) -> tuple[Parts, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(118, 124, (outputs, width // 32), dtype=torch.uint8, generator=generator)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).reshape(outputs, width).long()
    powers = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": pairs, "weight_scale": exponents}, torch.from_numpy(E2M1)[codes] * powers


def compressed(layout: str, strategy: str, bits: int = 8, **weights) -> dict:
    group = {"weights": {"num_bits": bits, "type": "float", "strategy": strategy, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BF16 = torch.bfloat16
CASES = {
    "blocks": (BLOCKS, fp8("weight_scale_inv", (), 128)),
    "blocks bf16": (BLOCKS, fp8("weight_scale_inv", (), 128, BF16)),
    "blocks of 64": (BLOCKS | {"weight_block_size": [64, 64]}, fp8("weight_scale_inv", (), 64)),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", ())),
    "rows": ({"quant_method": "fbgemm_fp8"}, fp8("weight_scale", (-1, 1))),
    "modelopt": (MODELOPT, fp8("weight_scale", (1,))),
    "float-quantized tensor": (compressed("float-quantized", "tensor"), fp8("weight_scale", (1,), dtype=BF16)),
    "float-quantized rows": (compressed("float-quantized", "channel"), fp8("weight_scale", (-1, 1), dtype=BF16)),
    "naive-quantized rows": (compressed("naive-quantized", "channel"), fp8("weight_scale", (-1,))),
    "float-quantized blocks": (
        compressed("float-quantized", "block", block_structure=[128, 128]),
        fp8("weight_scale", (), 128),
    ),
    "NVFP4": (
        compressed("nvfp4-pack-quantized", "tensor_group", 4, group_size=16),
        nvfp4("weight_packed", "weight_global_scale"),
    ),
    "NVFP4 modelopt": (MODELOPT | {"quant_algo": "NVFP4"}, nvfp4("weight", "weight_scale_2")),
    "MXFP4": (compressed("mxfp4-pack-quantized", "group", 4, group_size=32), mxfp4),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A llama of two layers, whose rows are no multiples of 128."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 416, "num_hidden_layers": 2, "head_dim": 64}
    make_oracle("llama", **sizes).save_pretrained(folder)
    return folder


def folder_with(plain, path, config: dict, layers: dict[str, Parts], **more: torch.Tensor):
    """A copy of the folder with some layers in parts instead."""
    path.mkdir(exist_ok=True)
    fields = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | ({"quantization_config": config} if config else {})))
    tensors = load_file(plain / "model.safetensors")
    for layer, parts in layers.items():
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{name}": part for name, part in parts.items()}
    save_file(tensors | more, path / "model.safetensors")
    return path


def opened(plain, path, config, parts: Parts):
    return open_checkpoint(folder_with(plain, path, config, {GATE: parts})).tensors[f"{GATE}.weight"]


@pytest.mark.parametrize("case", CASES)
def test_codes_and_values_are_those_of_the_definition_to_the_bit(case, plain, tmp_path):
    config, made = CASES[case]
    parts, expected = made(1)
    tensor = opened(plain, tmp_path, config, parts)
    assert tensor.shape == (OUTPUTS, WIDTH)
    for found in (read_tensor(tensor), read(tensor.codes)):
        assert torch.equal(torch.from_numpy(found), expected)
    order = torch.tensor([130, 127, 128, 0, 199])
    assert torch.equal(torch.from_numpy(read(tensor.codes.rows(order.numpy()))), expected[order])
    # A scale for each row and 64 inputs at least.
    assert tensor.codes.num_bytes <= 1.07 * tensor.num_bytes


def test_rows_that_are_no_whole_steps_have_values_and_no_codes(plain, tmp_path):
    parts, expected = fp8("weight_scale_inv", (), 128)(1, width=200)
    tensor = opened(plain, tmp_path, BLOCKS, parts)
    assert tensor.codes is None
    assert torch.equal(torch.from_numpy(read_tensor(tensor)), expected)


SHAPES = {
    "self_attn.q": (256, WIDTH), "self_attn.k": (128, WIDTH), "self_attn.v": (128, WIDTH),
    "self_attn.o": (WIDTH, 256), "mlp.gate": (416, WIDTH), "mlp.up": (416, WIDTH), "mlp.down": (WIDTH, 416),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("case", ["blocks", "float-quantized rows", "NVFP4", "MXFP4"])
def test_a_model_gives_the_logits_of_the_values_in_float64(case, backend, plain, tmp_path):
    config, made = CASES[case]
    layers, values = {}, {}
    for i in range(2):
        for number, (name, shape) in enumerate(SHAPES.items()):
            layer = f"model.layers.{i}.{name}_proj"
            layers[layer], values[f"{layer}.weight"] = made(10 * i + number, *shape)
    dense = folder_with(plain, tmp_path / "dense", {}, {})
    save_file(load_file(dense / "model.safetensors") | values, dense / "model.safetensors")
    oracle = type(make_oracle("llama")).from_pretrained(dense, dtype=torch.float64, attn_implementation="eager")
    ids = random_ids(20, seed=0)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].float()
    ops = make_ops(backend, 2)
    if backend == NATIVE and type(ops) is Ops:
        pytest.skip("no native ops on this machine")
    checkpoint = open_checkpoint(folder_with(plain, tmp_path / "coded", config, layers))
    model = models.load(checkpoint, ops=ops, dtype=torch.float32, quantization=Quantization.FILE)
    assert {"float32", "4 bits" if "FP4" in case else "8 bits"} == set(model.held_bytes)
    tolerance = 5e-3 if backend == NATIVE else 2e-4  # the native ops round inputs to 16 bits
    torch.testing.assert_close(Driver(model).step([(1, ids)])[0], expected, rtol=1e-3, atol=tolerance)


def test_scales_of_activations_are_left_out_and_named_once(plain, tmp_path, caplog):
    parts, expected = fp8("weight_scale", ())(1)
    more = {f"{GATE}.input_scale": torch.ones(()), "model.layers.0.self_attn.k_scale": torch.ones(())}
    path = folder_with(plain, tmp_path, {"quant_method": "fp8"}, {GATE: parts}, **more)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            checkpoint = open_checkpoint(path)
    assert torch.equal(torch.from_numpy(read_tensor(checkpoint.tensors[f"{GATE}.weight"])), expected)
    assert not any("scale" in name for name in checkpoint.tensors)
    assert len([r for r in caplog.records if "activation_scales_unused" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    ("case", "name", "change"),
    [
        ("blocks", "weight_scale_inv", lambda t: None),
        ("blocks", "weight_scale_inv", lambda t: t.T.contiguous()),
        ("blocks", "weight_scale_inv", lambda t: t[:1].contiguous()),
        ("blocks", "weight_scale_inv", lambda t: t[:, :2].contiguous()),
        ("blocks", "weight_scale_inv", lambda t: t.to(torch.int32)),
        ("blocks", "weight_scale_inv", lambda t: torch.ones(())),
        ("tensor", "weight_scale", lambda t: torch.ones(3)),
        ("rows", "weight_scale", lambda t: t[:-1].contiguous()),
        ("rows", "weight", lambda t: t.to(torch.bfloat16)),
        ("rows", "weight", lambda t: t[0].contiguous()),
        ("NVFP4", "weight_global_scale", lambda t: None),
        ("NVFP4", "weight_global_scale", lambda t: torch.ones(2)),
        ("NVFP4", "weight_scale", lambda t: t[:, :-1].contiguous()),
        ("NVFP4", "weight_scale", lambda t: t.float()),
        ("NVFP4", "weight_packed", lambda t: None),
        ("MXFP4", "weight_scale", lambda t: t[:, :-1].contiguous()),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_name(case, name, change, plain, tmp_path):
    config, made = CASES[case]
    parts, _ = made(1)
    changed = change(parts.pop(name))
    with pytest.raises(ModelError, match=r"gate_proj.* are not the parts of a layer in"):
        opened(plain, tmp_path, config, parts if changed is None else parts | {name: changed})


def spoilt(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """With the last entry replaced: of bytes by one with all bits set, which is NaN in every type."""
    whole = tensor.clone()
    if tensor.element_size() == 1:
        whole.view(torch.uint8).view(-1)[-1] = 0xFF
    else:
        whole.view(-1)[-1] = value
    return whole


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FILE])
@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("blocks", "weight", math.nan),
        ("blocks", "weight_scale_inv", math.inf),
        ("blocks", "weight_scale_inv", math.nan),
        ("blocks", "weight_scale_inv", 1e38),  # the weights are infinite
        ("rows", "weight_scale", -math.inf),
        ("NVFP4", "weight_scale", math.nan),
        ("NVFP4", "weight_global_scale", 0.0),
        ("MXFP4", "weight_scale", math.nan),
    ],
)
def test_what_is_not_finite_is_refused_by_name(case, name, value, quantization, plain, tmp_path):
    config, made = CASES[case]
    parts, _ = made(1, *SHAPES["mlp.gate"])
    parts[name] = spoilt(parts[name], value)
    up = made(2, *SHAPES["mlp.up"])[0]  # which runs as one with the gate
    layers = {GATE: parts, GATE.replace("gate", "up"): up}
    checkpoint = open_checkpoint(folder_with(plain, tmp_path, config, layers))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj.* not finite"):
        models.load(checkpoint, ops=make_ops("torch", 1), dtype=torch.float32, quantization=quantization)


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        BLOCKS | {"fmt": "e5m2"},
        BLOCKS | {"weight_block_size": [128]},
        BLOCKS | {"weight_block_size": [0, 128]},
        BLOCKS | {"weight_block_size": [1 << 40, 1 << 40]},
        MODELOPT | {"quant_algo": "W4A8"},
        compressed("float-quantized", "block"),
        compressed("float-quantized", "group", group_size=128),
        compressed("float-quantized", "tensor", bits=4),
        compressed("nvfp4-pack-quantized", "tensor_group", 4, group_size=32),
        compressed("nvfp4-pack-quantized", "tensor_group", 4, group_size=16) | {"config_groups": {"a": {}, "b": {}}},
    ],
    ids=str,
)
def test_other_layouts_are_refused(config):
    with pytest.raises(ModelError, match=r"quantization_config .* is not supported"):
        config_of(LLAMA | {"quantization_config": config})


@pytest.mark.parametrize(
    ("ignored", "name", "kept"),
    [
        (["lm_head", "model.layers.0.mlp.gate"], "model.layers.0.mlp.gate", False),
        (["model.layers.0.mlp.gate"], "model.layers.0.mlp.gate_proj", True),
        (["model.layers.0.self_attn"], "model.layers.0.self_attn.q_proj", False),
        (["*.self_attn*"], "model.layers.0.self_attn.q_proj", False),
        (["re:.*self_attn"], "model.layers.0.self_attn.q_proj", False),
        ([r"re:.*\.mlp\.gate$"], "model.layers.0.mlp.gate_proj", True),
        ([r"re:.*\.mlp\.gate$"], "model.layers.0.mlp.gate", False),
        (["re:(.*)*x", "re:" + ".*" * 12 + "x", 7], "model.layers.0.mlp.gate", True),
    ],
)
def test_modules_that_are_not_converted_have_no_format(ignored, name, kept):
    packing = config_of(LLAMA | {"quantization_config": BLOCKS | {"modules_to_not_convert": ignored}}).packing
    assert (packing.format(f"{name}.weight", 256) is not None) == kept
