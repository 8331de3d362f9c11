"""The language model inside a larger one gives the logits of the whole for text, whatever its files call it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay import models
from forebay.base.errors import ModelError
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.outer import OUTERS as TABLE
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_into
from forebay.formats.weight_shapes import ValueBytes
from forebay.models.encoder import load_encoder
from forebay.models.quantized_copy import write_quantized
from tests.models.drive import Driver
from tests.models.outers import OUTERS, logits_of, make_outer, published, rewrite, save_as_published
from tests.models.tiny import random_ids

IDS = random_ids(40, seed=1)
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The oracle of a case, its folder as published, and its logits, made once."""
    known = {}

    def make(name):
        if name not in known:
            case = OUTERS[name]
            oracle = make_outer(case)
            folder = save_as_published(oracle, case, tmp_path_factory.mktemp(name))
            known[name] = oracle, folder, logits_of(oracle, IDS)
        return known[name]

    return make


def test_every_outer_type_has_a_case():
    assert {case.outer for case in OUTERS.values()} == TABLE.keys()


@pytest.mark.parametrize("name", OUTERS)
def test_published_names_give_the_logits_of_transformers(name, made, load):
    _, folder, expected = made(name)
    assert open_checkpoint(folder).config.model_type == OUTERS[name].ours
    (logits,) = Driver(load(folder)).step([(1, IDS)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(OUTERS.keys() - {"kimi_k25"})
)  # 5.23 saves its layers as blocks, as those of images
def test_what_transformers_saves_gives_the_same_logits(name, made, load, tmp_path):
    oracle, _, expected = made(name)
    oracle.save_pretrained(tmp_path)
    (logits,) = Driver(load(tmp_path)).step([(1, IDS)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


# The modules of glm5_next have three convolutions of its files in one, and those of qwen4_exp all parts of a table of
# n-grams: files are as published.
@pytest.mark.parametrize("name", [name for name in OUTERS if name not in ("glm5_next", "qwen4_exp-ngrams")])
def test_names_of_modules_in_transformers_give_the_same_tensors(name, made, tmp_path):
    """As files of transformers 5 have them that were not renamed when they were saved."""
    oracle, folder, _ = made(name)
    oracle.config.save_pretrained(tmp_path)
    tied = getattr(oracle.config, "tie_word_embeddings", False)
    tensors = {name: values for name, values in oracle.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    ours, theirs = (open_checkpoint(path).tensors for path in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    assert all(name.startswith(("model.", "lm_head.")) for name in ours)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_files_of_qwen_vl_give_the_same_logits(name, made, load, tmp_path):
    _, folder, expected = made(name)
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    text = fields.pop("text_config")
    rope = {**text.pop("rope_parameters")}
    theta = rope.pop("rope_theta")
    if rope.pop("rope_type") == "default":
        rope["type"] = "mrope"
    else:
        rope["type"] = "yarn"
    flat = {**text, **fields, "rope_theta": theta, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    (logits,) = Driver(load(tmp_path)).step([(1, IDS)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert open_checkpoint(tmp_path).config.unknown_options == ()


def test_parts_that_are_not_served_are_logged_once(made, tmp_path, caplog, monkeypatch):
    oracle, _, _ = made("llava")
    folder = save_as_published(oracle, OUTERS["llava"], tmp_path)
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(folder)
        open_checkpoint(folder)
    lines = [record.getMessage() for record in caplog.records if "parts_not_served" in record.getMessage()]
    assert len(lines) == 1
    assert "multi_modal_projector,vision_tower" in lines[0]
    assert all(name.startswith(("model.", "lm_head.")) for name in checkpoint.tensors)


@pytest.mark.parametrize("name", ["mistral3", "qwen2_vl"])
def test_names_of_two_kinds_in_one_checkpoint_are_refused(name, made, tmp_path):
    oracle, _, _ = made(name)
    case = OUTERS[name]
    oracle.config.save_pretrained(tmp_path)
    tensors, own = published(oracle, case), "model.language_model.norm.weight"
    tensors[own] = tensors.pop(case.hub["model.language_model."] + "norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="of two checkpoints") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_head_that_the_files_bring_is_used_although_they_are_tied(made, load, tmp_path):
    oracle, _, expected = made("mistral3")
    save_as_published(oracle, OUTERS["mistral3"], tmp_path)
    rewrite(tmp_path, lambda fields: {**fields, "tie_word_embeddings": True})
    (logits,) = Driver(load(tmp_path)).step([(1, IDS)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": None}])
def test_files_without_a_head_that_say_nothing_are_tied_as_in_transformers(said, made, load, tmp_path):
    oracle, _, expected = made("internvl")
    save_as_published(oracle, OUTERS["internvl"], tmp_path)

    def silent(fields):
        text = {name: value for name, value in fields["text_config"].items() if name != "tie_word_embeddings"}
        rest = {name: value for name, value in fields.items() if name != "tie_word_embeddings"}
        return {**rest, **said, "text_config": text}

    (logits,) = Driver(load(rewrite(tmp_path, silent))).step([(1, IDS)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_stacks_of_experts_are_turned_by_their_shape_alone(made):
    """Published files of Qwen 3 VL have inputs before outputs, those that hold transformers' own modules do not."""
    oracle, folder, _ = made("qwen3_vl_moe")
    stored = load_file(folder / "model.safetensors")["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert stored.shape == (6, 48, 2 * 20)
    gate = open_checkpoint(folder).tensors["model.layers.0.mlp.experts.2.gate_proj.weight"]
    values = torch.cat([torch.from_numpy(piece.copy()) for piece in gate.pieces()])
    own = dict(oracle.named_parameters())["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(values.view(gate.shape), own[2, : gate.shape[0]])


# -- codes -----------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def wide(name, folder):
    """A case whose rows are long enough for groups."""
    case = replace(OUTERS[name], fields={**OUTERS[name].fields, **WIDE})
    return save_as_published(make_outer(case), case, folder)


@pytest.mark.parametrize("name", ["mistral3", "smolvlm"])
def test_quantized_copy_gives_the_bits_of_the_original_quantized(name, native, tmp_path):
    source = wide(name, tmp_path / "source")
    made = tmp_path / "made"
    made.mkdir()
    write_quantized(open_checkpoint(source), made, Quantization.INT4, quantize_into, lambda done, total: None)
    assert json.loads((made / "config.json").read_text())["model_type"] == name
    results = []
    for folder, quantization in ((source, Quantization.INT4), (made, Quantization.FILE)):
        checkpoint = open_checkpoint(folder)
        model = models.load(checkpoint, ops=native, dtype=torch.float32, quantization=quantization)
        results.append(Driver(model).step([(1, IDS)])[0])
    assert torch.equal(*results)


def test_fp8_of_published_names_is_read_and_planned_without_the_modules_that_are_ignored(native, tmp_path):
    """As Ministral 3 is published, and the attention of a layer in bfloat16, by the names of the files."""
    source, plain = wide("mistral3", tmp_path), "language_model.model.layers.1.self_attn"
    tensors, expected = {}, {}
    for name, values in load_file(source / "model.safetensors").items():
        tensors[name] = values.to(torch.bfloat16)
        if ".layers." in name and name.endswith("proj.weight") and not name.startswith((plain, "vision_tower.")):
            codes, scale = (values / 0.01).to(torch.float8_e4m3fn), torch.tensor([[0.01]])
            tensors |= {
                name: codes,
                f"{name}_scale_inv": scale,
                name.replace("weight", "activation_scale"): scale[0].clone(),
            }
            expected[name.removeprefix("language_model.")] = codes.float() * 0.01
    save_file(tensors, source / "model.safetensors")
    ignored = ["model.vision_tower", "model.multi_modal_projector", "language_model.lm_head", plain]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ignored}
    rewrite(source, lambda fields: {**fields, "dtype": "bfloat16", "quantization_config": fp8})
    checkpoint = open_checkpoint(source)
    for name, values in expected.items():
        found = torch.cat([torch.from_numpy(piece.copy()) for piece in checkpoint.tensors[name].pieces()])
        torch.testing.assert_close(found.view(values.shape), values)
    assert len(expected) == 3 * 7 - 4
    model = models.load(checkpoint, ops=native, dtype=torch.float32, quantization=Quantization.FILE)
    planned = read_shape(source, draft_head=False).weights
    encoder = load_encoder(checkpoint, ops=native, dtype=torch.float32, progress=lambda *_: None)
    held = sum(model.held_bytes.values()) + encoder.weight_bytes
    assert planned.held_bytes(Quantization.FILE, ValueBytes(own=4, bfloat16=2)) == held
    (logits,) = Driver(model).step([(1, IDS)])
    assert logits.isfinite().all()
