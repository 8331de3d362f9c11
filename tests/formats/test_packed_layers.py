"""Layers in the layouts of GPTQ, AWQ and compressed-tensors: the values that their own definitions give."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_in_any_order

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.stored_tensor import read_tensor
from tests.formats.coded import read
from tests.models.drive import Driver
from tests.models.tiny import make_oracle, random_ids

OUTPUTS, WIDTH = 40, 256


def save_file(tensors, path):
    save_in_any_order({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's fields, the lowest first


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """fields [n, m] along m into int32, the lowest bits first."""
    grouped = fields.reshape(len(fields), -1, 32 // bits).astype(np.uint64)
    packed = (grouped << (np.arange(32 // bits, dtype=np.uint64) * bits)).sum(axis=-1)
    return packed.astype(np.uint32).view(np.int32)


class Packed:
    """A layer [N, K] by the definitions: scale[group] * (code - zero[group])."""

    def __init__(
        self, *, bits: int = 4, group: int = 64, symmetric: bool = False, outputs=OUTPUTS, width=WIDTH, seed=0
    ):
        draw = np.random.default_rng(seed)
        self.bits, self.symmetric = bits, symmetric
        shape = (outputs, width // group)
        self.codes = draw.integers(0, 1 << bits, (outputs, width))
        self.zeros = np.full(shape, 1 << bits - 1) if symmetric else draw.integers(1, 1 << bits, shape)
        self.scales = (draw.uniform(0.5, 1.5, shape) / (1 << bits) / width**0.5).astype(np.float16)
        self.groups = np.arange(width) // group

    def values(self) -> np.ndarray:
        steps = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        return self.scales[:, self.groups].astype(np.float32) * steps

    def gptq(self, offset: int = 1) -> dict[str, np.ndarray]:
        return {
            "qweight": words(self.codes, self.bits).T,
            "qzeros": words((self.zeros - offset).T, self.bits),
            "scales": self.scales.T,
            "g_idx": self.groups.astype(np.int32),
        }

    def awq(self) -> dict[str, np.ndarray]:
        def mixed(by_output: np.ndarray) -> np.ndarray:
            fields = by_output.T.reshape(by_output.shape[1], -1, 8)[..., AWQ_OUTPUTS]
            return words(fields.reshape(by_output.shape[1], -1), 4)

        return {"qweight": mixed(self.codes), "qzeros": mixed(self.zeros), "scales": self.scales.T}

    def compressed(self) -> dict[str, np.ndarray]:
        parts = {
            "weight_packed": words(self.codes, self.bits),
            "weight_scale": self.scales,
            "weight_shape": np.array(self.codes.shape),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = words(self.zeros.T, self.bits).T
        return parts

    def bytes(self) -> dict[str, np.ndarray]:
        return {"weight": (self.codes - (1 << self.bits - 1)).astype(np.int8), "weight_scale": self.scales}


def compressed_config(layout: str, **weights) -> dict:
    group = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
CASES = {
    "gptq": (GPTQ, Packed(), Packed.gptq),
    "gptq symmetric": (GPTQ | {"sym": True}, Packed(symmetric=True), Packed.gptq),
    "gptq of 8 bits": (GPTQ | {"bits": 8, "group_size": 32}, Packed(bits=8, group=32), Packed.gptq),
    "gptq by row": (GPTQ | {"group_size": -1}, Packed(group=WIDTH), Packed.gptq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, Packed(), lambda packed: packed.gptq(offset=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, Packed(), Packed.awq),
    "packed": (compressed_config("pack-quantized", group_size=64, symmetric=False), Packed(), Packed.compressed),
    "packed symmetric": (
        compressed_config("pack-quantized", group_size=128),
        Packed(group=128, symmetric=True),
        Packed.compressed,
    ),
    "int8 by row": (
        compressed_config("int-quantized", num_bits=8, strategy="channel"),
        Packed(bits=8, group=WIDTH, symmetric=True),
        Packed.bytes,
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A llama of two layers with rows of 256 and 512."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    make_oracle("llama", **sizes).save_pretrained(folder)
    return folder


def folder_with(plain, path, config: dict, layers: dict[str, dict[str, np.ndarray]], **more: np.ndarray):
    """A copy of the folder with some layers in parts instead."""
    fields = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    tensors = load_file(plain / "model.safetensors")
    for layer, parts in layers.items():
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{name}": part for name, part in parts.items()}
    save_file(tensors | more, path / "model.safetensors")
    return path


GATE = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize("case", CASES)
def test_codes_and_values_are_those_of_the_definition(case, plain, tmp_path):
    config, packed, parts = CASES[case]
    tensor = open_checkpoint(folder_with(plain, tmp_path, config, {GATE: parts(packed)})).tensors[f"{GATE}.weight"]
    assert tensor.shape == (OUTPUTS, WIDTH)
    np.testing.assert_allclose(read_tensor(tensor), packed.values(), rtol=1e-6, atol=0)
    # The minimum that stands for a zero point is rounded.
    tolerance = 0 if packed.symmetric else float(packed.scales.max()) * (1 << packed.bits) / 2048
    np.testing.assert_allclose(read(tensor.codes), packed.values(), rtol=1e-6, atol=tolerance)
    order = np.array([3, 39, 0, 8])
    np.testing.assert_allclose(read(tensor.codes.rows(order)), packed.values()[order], rtol=1e-6, atol=tolerance)
    assert tensor.codes.num_bytes <= 1.05 * tensor.num_bytes or (packed.groups[-1] == 0 and not packed.symmetric)


def test_inputs_of_a_group_that_are_no_neighbours_are_values_without_codes(plain, tmp_path):
    packed = Packed()
    packed.groups = np.random.default_rng(1).permutation(packed.groups)
    config = GPTQ | {"desc_act": True}
    tensor = open_checkpoint(folder_with(plain, tmp_path, config, {GATE: packed.gptq()})).tensors[f"{GATE}.weight"]
    assert tensor.codes is None
    np.testing.assert_allclose(read_tensor(tensor), packed.values(), rtol=1e-6)


def test_a_model_of_packed_layers_gives_the_logits_of_their_values(plain, tmp_path):
    shapes = {
        f"model.layers.{i}.{name}_proj": shape
        for i in range(2)
        for name, shape in {
            "self_attn.q": (256, 256), "self_attn.k": (128, 256), "self_attn.v": (128, 256),
            "self_attn.o": (256, 256), "mlp.gate": (512, 256), "mlp.up": (512, 256), "mlp.down": (256, 512),
        }.items()
    }  # fmt: skip
    layers = {
        name: Packed(outputs=shape[0], width=shape[1], symmetric=True, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    values = {f"{name}.weight": packed.values() for name, packed in layers.items()}
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file(load_file(plain / "model.safetensors") | values, dense / "model.safetensors")
    (dense / "config.json").write_text((plain / "config.json").read_text())
    bias = {f"{GATE}.bias": np.zeros(512, np.float16)}  # that the model does not have
    parts = {name: packed.gptq() for name, packed in layers.items()}
    coded = folder_with(plain, tmp_path, GPTQ | {"sym": True}, parts, **bias)
    ops, ids = make_ops("torch", 1), random_ids(20, seed=0)
    expected, got = (
        Driver(models.load(open_checkpoint(path), ops=ops, dtype=torch.float32, quantization=kept)).step([(1, ids)])[0]
        for path, kept in ((dense, Quantization.NONE), (coded, Quantization.FILE))
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qweight", lambda part: part[:, :-8]),
        ("qzeros", lambda part: part[:-1]),
        ("scales", lambda part: part[0]),
        ("g_idx", lambda part: part + 4),
        ("g_idx", lambda part: part - 1),
        ("qweight", lambda part: part.view(np.float32)),
        ("scales", lambda part: part.astype(np.int32)),
    ],
)
def test_parts_that_do_not_go_together_are_refused(name, change, plain, tmp_path):
    parts = Packed().gptq()
    parts[name] = change(parts[name])
    with pytest.raises(ModelError, match="not the parts of a gptq layer"):
        open_checkpoint(folder_with(plain, tmp_path, GPTQ, {GATE: parts}))


def test_zero_points_where_the_configuration_has_none_are_refused(plain, tmp_path):
    found = open_checkpoint(folder_with(plain, tmp_path, GPTQ | {"sym": True}, {GATE: Packed().gptq()}))
    with pytest.raises(ModelError, match="zero points"):
        read(found.tensors[f"{GATE}.weight"].codes)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq"},
        GPTQ | {"bits": 3},
        GPTQ | {"group_size": 0},
        GPTQ | {"group_size": "128"},
        GPTQ | {"dynamic": {"lm_head": {}}},
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
        {"quant_method": "bitsandbytes"},
        compressed_config("float-quantized"),
        compressed_config("pack-quantized", type="float", group_size=64),
        compressed_config("pack-quantized", strategy="tensor"),
        compressed_config("pack-quantized", num_bits=2, group_size=64),
        compressed_config("pack-quantized", group_size=64) | {"config_groups": {"a": {}, "b": {}}},
        "gptq",
    ],
    ids=str,
)
def test_other_layouts_are_refused_by_name(config, plain, tmp_path):
    with pytest.raises(ModelError, match=r"quantization_config .* is not supported"):
        open_checkpoint(folder_with(plain, tmp_path, config, {}))
