"""The language model of a multimodal checkpoint is served by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from forebay.families.checkpoint import open_checkpoint
from tests.models.drive import Driver
from tests.models.tiny import BASE, CASES, random_ids

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


TYPES = {
    "gemma3": (
        VISION | {"image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "gemma4": (
        VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        {"image_token_id": 7, "boi_token_id": 6, "eoi_token_id": 5},
    ),
}


@pytest.fixture(scope="module", params=TYPES)
def nested(request, tmp_path_factory):
    outer, (vision, fields) = request.param, TYPES[request.param]
    inner = f"{outer}_text"
    text = {**BASE, **CASES[inner][1], "model_type": inner}
    config = AutoConfig.for_model(outer, text_config=text, vision_config=vision, **fields)
    torch.manual_seed(0)
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    path = tmp_path_factory.mktemp(outer)
    oracle.save_pretrained(path)
    return oracle, path


def test_a_multimodal_model_gives_the_logits_of_its_language_model(nested, load):
    oracle, path = nested
    ids = random_ids(40, seed=1)
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    (logits,) = Driver(load(path)).step([(1, ids)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_other_parts_stay_in_the_file(nested):
    oracle, path = nested
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.model_type == f"{oracle.config.model_type}_text"
    assert all(name.startswith("model.") for name in checkpoint.tensors)
