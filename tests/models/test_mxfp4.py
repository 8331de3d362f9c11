"""gpt-oss as it is published, its experts packed in MXFP4, gives the logits of the weights that this stands for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
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


def test_packed_experts_give_the_logits_of_transformers(published, load):
    oracle, path = published
    ids = random_ids(40, seed=1)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "change"),
    [("scales", None), ("blocks", lambda t: t[..., :8].contiguous()), ("scales", lambda t: t.flatten())],
)
def test_blocks_and_scales_that_do_not_go_together_are_refused(kind, change, published):
    path = published[1]
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.0.mlp.experts.down_proj_{kind}"
    tensors |= {name: change(tensors[name])} if change else {}
    if change is None:
        del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match="do not go together"):
        open_checkpoint(path)
