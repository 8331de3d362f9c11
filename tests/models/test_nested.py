"""The language model of a multimodal checkpoint is served by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from forebay.families.checkpoint import open_checkpoint
from tests.models.drive import Driver
from tests.models.tiny import BASE, CASES, random_ids

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    text = {**BASE, **CASES["gemma3_text"][1], "model_type": "gemma3_text"}
    vision = {**VISION, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    path = tmp_path_factory.mktemp("gemma3")
    oracle.save_pretrained(path)
    return oracle, path


def test_gemma3_gives_the_logits_of_its_language_model(gemma3, load):
    oracle, path = gemma3
    ids = random_ids(40, seed=1)
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_other_parts_stay_in_the_file(gemma3):
    checkpoint = open_checkpoint(gemma3[1])
    assert checkpoint.config.model_type == "gemma3_text"
    assert all(name.startswith("model.") for name in checkpoint.tensors)
