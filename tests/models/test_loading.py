"""Loading: every weight is used and is what it should be, in any layout of the files."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families import TYPES
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.pools.cache_spec import FullAttention, SlidingWindow
from tests.formats.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.models.drive import Driver
from tests.models.tiny import make_tiny, random_ids
from tests.together import together

TORCH = make_ops("torch", 1)


def load_float32(path, **options):
    return models.load(open_checkpoint(path), ops=TORCH, dtype=torch.float32, **options)


@pytest.mark.slow
@together("model_type", TYPES)
def test_each_model_type_that_can_be_opened_has_a_file(model_type, tiny):
    config = open_checkpoint(tiny(model_type).path).config
    assert models.describe(config).max_positions == config.max_position_embeddings


def test_shards_give_the_same_model(tmp_path, load):
    sharded = make_tiny("qwen2", tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = random_ids(20, seed=0)
    (logits,) = Driver(load(tmp_path)).step([(1, ids)])
    torch.testing.assert_close(logits, sharded.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", [Quantization.FILE, Quantization.INT8, Quantization.INT4, Quantization.NONE])
def test_load_code_scale_not_finite_is_refused_by_the_name_of_its_tensor(tmp_path, quantization):
    tensors = llama_tensors("Q8_0")
    load = partial(models.load, ops=TORCH, dtype=torch.float32, quantization=quantization)
    path = write_gguf(tmp_path / "whole.gguf", llama_metadata(), tensors, type_name="Q8_0")
    load(open_checkpoint(path))
    tensors["blk.0.ffn_up.weight"][-1, :2] = 0x00, 0x7E  # the first block's scale, in float16
    path = write_gguf(tmp_path / "damaged.gguf", llama_metadata(), tensors, type_name="Q8_0")
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight.*(not finite|beyond float16)"):
        load(open_checkpoint(path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stored_in_16_bits_are_widened_exactly(dtype, tmp_path, load):
    tiny = make_tiny("qwen3", tmp_path)
    stored = {name: values.to(dtype) for name, values in load_file(tmp_path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    with torch.no_grad():
        for parameter in tiny.oracle.parameters():
            parameter.copy_(parameter.to(dtype))
    ids = random_ids(20, seed=0)
    (logits,) = Driver(load(tmp_path)).step([(1, ids)])
    torch.testing.assert_close(logits, tiny.logits(ids), rtol=0, atol=1e-4)


def test_bfloat16_models_stay_near_float32(tiny, ops):
    path, ids = tiny("llama").path, random_ids(20, seed=0)
    model = models.load(open_checkpoint(path), ops=ops, dtype=torch.bfloat16)
    (logits,) = Driver(model, dtype=torch.bfloat16).step([(1, ids)])
    expected = tiny("llama").logits(ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.fixture
def edit(tiny, tmp_path):
    """A copy of a case with its tensors and configuration changed."""

    def edited(case, change, **config):
        tensors = load_file(tiny(case).path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        fields = json.loads((tiny(case).path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | config))
        return tmp_path

    return edited


def test_missing_weights_are_named(edit):
    path = edit("llama", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"1 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_float32(path)


def test_unused_weights_are_named(edit):
    path = edit("llama", lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))
    with pytest.raises(ModelError, match=r"no use in a llama model.*q_norm\.weight"):
        load_float32(path)


def test_long_lists_of_names_are_cut(edit):
    path = edit("llama", lambda tensors: None, num_hidden_layers=20)
    with pytest.raises(ModelError, match=r"153 weights are missing: .* and 148 more"):
        load_float32(path)


def test_wrong_shapes_are_named(edit):
    path = edit("llama", lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \(47,\) instead of \(48,\)"):
        load_float32(path)


def test_nothing_is_read_of_a_checkpoint_that_does_not_fit(edit):
    seen = []
    path = edit("llama", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError):
        load_float32(path, progress=lambda done, total: seen.append(done))
    assert seen == []


def test_what_follows_from_the_configuration_may_be_there(edit, tiny):
    ids = random_ids(9, seed=0)
    path = edit(
        "llama", lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    )
    (logits,) = Driver(load_float32(path)).step([(1, ids)])
    torch.testing.assert_close(logits, tiny("llama").logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-biases-tied", "mamba", "gemma3_text", "falcon_h1-norm-before-gate-tied"])
def test_a_head_that_the_checkpoint_brings_is_used_whatever_the_configuration_says(case, edit):
    """As transformers does, unless it equals the embedding, which makes no difference."""
    head = torch.randn(96, 48, generator=torch.Generator().manual_seed(5))
    path, ids = edit(case, lambda tensors: tensors.update({"lm_head.weight": head})), random_ids(9, seed=0)
    theirs = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    assert theirs.config.tie_word_embeddings
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load_float32(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1.5e-4)


def test_progress_ends_at_the_total(tiny):
    calls = []
    model = load_float32(tiny("qwen3_moe").path, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (model.weight_bytes, model.weight_bytes)
    assert model.weight_bytes == 4 * sum(p.numel() for p in tiny("qwen3_moe").oracle.parameters())


def test_a_shorter_context_changes_no_logits(tiny):
    path, ids = tiny("llama-rope-yarn").path, random_ids(20, seed=0)
    (short,) = Driver(load_float32(path, context_length=20)).step([(1, ids)])
    (long,) = Driver(load_float32(path)).step([(1, ids)])
    assert torch.equal(short, long)


@pytest.mark.parametrize("context_length", [0, 257])
def test_a_context_that_the_model_does_not_have_is_refused(context_length, tiny):
    with pytest.raises(ModelError, match="256 positions"):
        load_float32(tiny("llama").path, context_length=context_length)


def test_cache_specs_say_what_each_layer_keeps(tiny):
    full, window = FullAttention(num_kv_heads=2, head_dim=12), SlidingWindow(num_kv_heads=2, head_dim=12, window=5)
    assert load_float32(tiny("qwen2-window").path).cache_specs() == (full, window, window)
    assert load_float32(tiny("qwen2").path).cache_specs() == (full, full, full)
