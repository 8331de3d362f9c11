"""gpt-oss as it is published: its experts stay in MXFP4, and give the logits of the weights that this stands for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.stored_tensor import read_tensor
from tests.formats.coded import read
from tests.models.drive import Driver
from tests.models.tiny import BASE, CASES, random_ids

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PACKED = {"gate_up_proj": (192, 2), "down_proj": (64, 3)}  # outputs, and blocks of 32 inputs


@pytest.fixture
def published(tmp_path):
    """A model, and its checkpoint with random blocks; the model has what transformers unpacks from these."""
    config = AutoConfig.for_model("gpt_oss", **{**BASE, **CASES["gpt_oss"][1], **SIZES})
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = dict(oracle.named_parameters())
    for name in [name for name in tensors if name.endswith(tuple(PACKED))]:
        outputs, blocks = PACKED[name.rpartition(".")[2]]
        packed = torch.randint(0, 256, (6, outputs, blocks, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, (6, outputs, blocks), dtype=torch.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(convert_moe_packed_tensors(packed, scales, dtype=torch.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return oracle, tmp_path


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FILE])
def test_packed_experts_give_the_logits_of_transformers(quantization, published, ops):
    oracle, path = published
    ids = random_ids(40, seed=1)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    model = models.load(open_checkpoint(path), ops=ops, dtype=torch.float32, quantization=quantization)
    assert ("4 bits" in model.held_bytes) == (quantization is Quantization.FILE)
    (logits,) = Driver(model).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_each_expert_has_the_values_of_its_blocks(published):
    oracle, path = published
    tensors, parameters = open_checkpoint(path).tensors, dict(oracle.named_parameters())
    for layer, expert in ((0, 0), (1, 5)):
        experts = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (parameters[f"{experts}.{name}"][expert].detach().numpy().T for name in PACKED)
        for name, expected in (("gate", gate_up[::2]), ("up", gate_up[1::2]), ("down", down)):
            tensor = tensors[f"{experts}.{expert}.{name}_proj.weight"]
            np.testing.assert_array_equal(read_tensor(tensor), expected)
            np.testing.assert_array_equal(read(tensor.codes), expected)
            assert tensor.codes.num_bytes == tensor.num_bytes == expected.size * 17 // 32


def change(path, name, changed):
    tensors = load_file(path / "model.safetensors")
    tensor = changed(tensors.pop(name))
    save_file(tensors if tensor is None else tensors | {name: tensor}, path / "model.safetensors")


DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("scales", lambda t: None, "do not go together"),
        ("blocks", lambda t: None, "no blocks"),
        ("blocks", lambda t: t[..., :8].contiguous(), "do not go together"),
        ("scales", lambda t: t.flatten(), "do not go together"),
        ("scales", lambda t: t.to(torch.float32), "do not go together"),
        ("bias", lambda t: t[:5].contiguous(), "not one part for each expert"),
        ("bias", lambda t: t[:, :0].contiguous(), "not one part for each expert"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(kind, changed, message, published):
    path = published[1]
    change(path, f"{DOWN}_{kind}", changed)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FILE])
@pytest.mark.parametrize("scale", [253, 255])
def test_scales_that_make_no_numbers_are_refused_by_name(scale, quantization, published):
    path = published[1]
    change(path, f"{DOWN}_scales", lambda t: t.index_fill(0, torch.tensor([4]), scale))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.4\.down_proj\.weight.* not finite"):
        models.load(open_checkpoint(path), ops=make_ops("torch", 1), dtype=torch.float32, quantization=quantization)
