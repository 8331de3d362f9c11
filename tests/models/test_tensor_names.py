"""Checkpoints that name or stack their tensors otherwise than transformers saves them give the same model."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.base.errors import ModelError
from tests.models import cases_experts
from tests.models.drive import Driver
from tests.models.tiny import Tiny, make_oracle, random_ids

IDS = random_ids(20, seed=3)


@pytest.fixture
def changed(tiny, tmp_path, load):
    """The logits of a case whose tensors are changed."""

    def logits(case, change):
        tensors = change(load_file(tiny(case).path / "model.safetensors"))
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((tiny(case).path / "config.json").read_text())
        (found,) = Driver(load(tmp_path)).step([(1, IDS)])
        return found

    return logits


def stacked(tensors):
    """All of a layer's experts in one tensor, gate above up, as published mixtures of Qwen 3.5 have them."""
    result = {name: values for name, values in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        count = sum(
            re.fullmatch(re.escape(layer) + r"\.experts\.\d+\.up_proj\.weight", name) is not None for name in tensors
        )
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(count)])
            for part in ("gate", "up", "down")
        )
        result[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        result[f"{layer}.experts.down_proj"] = down
    return result


@pytest.mark.parametrize(
    "case", ["qwen3_5_moe_text", "qwen3_next-some-dense-biases", "deepseek_v3", "exaone_moe", "hunyuan_v1_moe"]
)
def test_stacked_experts_are_the_same_model(case, tiny, changed):
    torch.testing.assert_close(changed(case, stacked), tiny(case).logits(IDS), rtol=0, atol=1e-4)


def own_names(oracle):
    """The tensors as transformers calls them while the model runs: experts in stacks, and no names of the hub."""
    return {name: values.clone() for name, values in oracle.state_dict().items()}


@pytest.mark.parametrize("case", sorted({model_type for model_type, _ in cases_experts.CASES.values()}))
def test_names_of_transformers_give_the_same_model_as_those_of_the_hub(case, tiny, changed):
    found = changed(case, lambda tensors: own_names(tiny(case).oracle))
    torch.testing.assert_close(found, tiny(case).logits(IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["mixtral", "minimax_m2", "ernie4_5_moe", "hy_v3"])
def test_a_tensor_under_both_of_its_names_is_refused(case, tiny, changed):
    with pytest.raises(ModelError, match="or under another name"):
        changed(case, lambda tensors: {**tensors, **own_names(tiny(case).oracle)})


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3_5_text", "mtp.norm.weight"),
        ("glm4_moe", "model.layers.3.enorm.weight"),
        ("minimax_m2", "model.layers.3.input_layernorm.weight"),
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight"),
        ("hy_v3", "model.layers.3.final_layernorm.weight"),
        ("qwen3_5_moe_text", "mtp.norm.weight"),
        ("qwen3_next", "mtp.norm.weight"),
        ("deepseek_v3", "model.layers.3.enorm.weight"),
        ("exaone_moe", "mtp.norm.weight"),
    ],
)
def test_what_drafts_tokens_is_left_in_the_file(case, name, tiny, changed):
    found = changed(case, lambda tensors: {**tensors, name: torch.ones(2)})
    torch.testing.assert_close(found, tiny(case).logits(IDS), rtol=0, atol=1e-4)


# transformers' names of tensors, some of which it saves under those of published files.
OTHER_NAMES = {
    "granitemoeshared": {
        "moe.input_linear.weight": "moe.experts.gate_up_proj",
        "moe.output_linear.weight": "moe.experts.down_proj",
        "router.layer.weight": "router.weight",
    },
    "exaone_moe": {"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
}


def renamed(tensors, names):
    for old, new in names.items():
        assert any(old in name for name in tensors)
        tensors = {name.replace(old, new): values for name, values in tensors.items()}
    return tensors


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_other_names_of_tensors_are_the_same_model(case, tiny, changed):
    found = changed(case, lambda tensors: renamed(tensors, OTHER_NAMES[case]))
    torch.testing.assert_close(found, tiny(case).logits(IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_two_names_of_one_tensor_in_a_file_are_refused(case, changed):
    def both(tensors):
        return {name: values.clone() for name, values in renamed(tensors, OTHER_NAMES[case]).items()} | tensors

    with pytest.raises(ModelError, match="under another name"):
        changed(case, both)


def test_published_gemma4_files_have_unused_keys_and_values(tiny, changed):
    """Of layers that read those of others."""
    own = {f"model.layers.{layer}.self_attn.{name}" for layer in (2, 3) for name in ("k_proj.weight", "v_norm.weight")}
    found = changed("gemma4_text", lambda tensors: {**tensors, **{name: torch.ones(2) for name in own}})
    torch.testing.assert_close(found, tiny("gemma4_text").logits(IDS), rtol=0, atol=1e-4)


def test_published_olmo_hybrids_are_read(tmp_path, load):
    """Values are wider than keys there, which transformers reads but cannot write."""
    oracle = make_oracle("olmo_hybrid", linear_value_head_dim=10)
    tensors = {}
    for name, values in oracle.state_dict().items():
        if "conv1d" in name:
            for part, kernel in zip("qkv", values.split([16, 16, 40]), strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = kernel.clone()
        elif ".1." in name:  # the layer of attention
            tensors[name] = values
        else:
            name = name.replace("input_layernorm", "attention_layer_norm")
            tensors[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = values
    save_file(tensors, tmp_path / "model.safetensors")
    oracle.config.save_pretrained(tmp_path)
    (found,) = Driver(load(tmp_path)).step([(1, IDS)])
    torch.testing.assert_close(found, Tiny(tmp_path, oracle).logits(IDS), rtol=0, atol=1e-4)
