"""An assistant drafts what transformers' drafts, over the KV that the model keeps here, and belongs to its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forebay.base.errors import ModelError
from forebay.families import ASSISTANTS
from forebay.families.checkpoint import open_checkpoint
from forebay.models import needs_of
from tests.models.assistants import CENTROIDS, load_for, make_assistant, our_drafts, their_drafts
from tests.models.tiny import VOCAB, random_ids, shared_tiny

TARGETS = ["gemma4_text", "gemma4_text-experts"]


@pytest.fixture(scope="module", params=[{}, CENTROIDS], ids=["every token", "centroids"])
def assistant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("assistant")
    return make_assistant(path, **request.param), path


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [2, 5, 40])
def test_drafts_are_those_of_transformers(target, length, assistant, load, ops):
    oracle, path = assistant
    model, ids = load(shared_tiny(target).path), random_ids(length, seed=length)
    ours = our_drafts(model, load_for(target, path, ops), ids)
    theirs = their_drafts(shared_tiny(target).oracle, oracle, ids)
    assert len(set(theirs)) > 1
    assert ours == theirs


WRONG = [
    ({}, {"vocab_size": 84}, "vocabulary of 84, and the model's is 96"),
    ({"backbone_hidden_size": 64}, {}, "hidden size of 64, and the model's is 48"),
    ({}, {"head_dim": 10}, "sliding_attention's heads of 10"),
    ({}, {"global_head_dim": 12}, "full_attention's heads of 12"),
    ({}, {"sliding_window": 7}, "sliding window of 7, and the model's is 6"),
    ({}, {"num_attention_heads": 3, "num_key_value_heads": 1}, "3 heads cannot share 2 of KV"),
    ({}, {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}, "hidden_size_per_layer_input"),
    ({**CENTROIDS, "num_centroids": 10}, {}, "num_centroids"),
    ({**CENTROIDS, "centroid_intermediate_top_k": 13}, {}, "centroid_intermediate_top_k"),
]


@pytest.mark.parametrize(("outer", "text", "message"), WRONG)
def test_an_assistant_of_another_model_is_refused_with_the_numbers(outer, text, message, tmp_path, assistant, ops):
    _, path = assistant
    fields = json.loads((path / "config.json").read_text())
    fields |= outer
    of_text = {name: value for name, value in fields["text_config"].items() if name != "per_layer_config"}
    fields["text_config"] = {**of_text, "global_head_dim": 20, **text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_for("gemma4_text", tmp_path, ops)


def test_an_assistant_is_for_models_of_its_family(assistant, ops):
    with pytest.raises(ModelError, match="drafts for gemma4_text, not for a model of type llama"):
        load_for("llama", assistant[1], ops)
    with pytest.raises(ModelError, match="type llama is no assistant"):
        load_for("gemma4_text", shared_tiny("llama").path, ops)


@pytest.mark.parametrize("model_type", ASSISTANTS)
def test_an_assistant_is_not_served_alone(model_type, assistant):
    config = open_checkpoint(assistant[1]).config
    assert config.model_type == model_type
    with pytest.raises(ModelError, match="only drafts for another model"):
        needs_of(config)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 3])
def test_an_order_that_is_none_is_refused(wrong, tmp_path, ops):
    """It would be an address."""
    make_assistant(tmp_path, **CENTROIDS)
    tensors = load_file(tmp_path / "model.safetensors")
    order = tensors["masked_embedding.token_ordering"]
    order[0] = wrong if wrong != 3 else int(order[1])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="token_ordering"):
        load_for("gemma4_text", tmp_path, ops)
