"""An assistant drafts what transformers' drafts, over the KV that the model keeps here, and belongs to its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from forebay.base.errors import ModelError
from forebay.families import ASSISTANTS
from forebay.families.checkpoint import open_checkpoint
from forebay.layers.context import ForwardContext
from forebay.models import Model, needs_of
from forebay.models.assistant import Assistant, load_assistant
from forebay.ops import Ops
from tests.models.cases_window import FULL, SLIDING
from tests.models.drive import Driver
from tests.models.tiny import VOCAB, make_random, random_ids, shared_tiny

TARGETS = ["gemma4_text", "gemma4_text-experts"]
WINDOW = 6
NUM_DRAFTS = 5
TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 20,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": WINDOW,
}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}


@pytest.fixture(scope="module", autouse=True)
def _all_layers_may_share() -> Iterator[None]:
    """Which is all that an assistant does, and what transformers 5.23 refuses before it gets there."""
    modes = Gemma4TextConfig.kv_sharing_modes
    assert isinstance(modes, property)

    def kv_sharing_modes(config: Any) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return modes.fget(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(kv_sharing_modes))
        yield


def make_assistant(folder: Path, **fields: Any) -> Any:
    outer = {"backbone_hidden_size": 48, **fields}
    oracle = make_random("gemma4_assistant", {"text_config": TEXT, **outer}, seed=7)
    if oracle.masked_embedding is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        oracle.masked_embedding.token_ordering.copy_(order)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="module", params=[{}, CENTROIDS], ids=["every token", "centroids"])
def assistant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("assistant")
    return make_assistant(path, **request.param), path


def load_for(target: str, path: Path, ops: Ops) -> Assistant:
    config = open_checkpoint(shared_tiny(target).path).config
    checkpoint = open_checkpoint(path)
    return load_assistant(
        checkpoint, config, ops=ops, dtype=torch.float32, progress=lambda done, total: None, num_positions=64
    )


def behind(ctx: ForwardContext, length: int) -> ForwardContext:
    """What a query at position `length`, behind so many tokens of one row, is told."""
    one = {"q_start": torch.tensor([0, 1], dtype=torch.int32), "seq_lens": torch.tensor([length], dtype=torch.int32)}
    pages = {name: replace(getattr(ctx, name), **one) for name in ("full", "window")}
    return replace(ctx, positions=torch.tensor([length]), **pages)


def our_drafts(model: Model, assistant: Assistant, ids: list[int]) -> list[int]:
    """Behind ids, the last of which has no KV."""
    driver = Driver(model)
    ctx, input_ids = driver.inputs([(1, ids[:-1])])
    hidden = model.forward(ctx, input_ids)[-1:]
    ctx, token, drafts = behind(ctx, len(ids) - 1), torch.tensor(ids[-1:]), []
    before = [table.clone() for table in driver.cache.tables["kv"].tensors]
    for _ in range(NUM_DRAFTS):
        x = assistant.forward(ctx, model.embed(token), hidden)
        token, hidden = assistant.token_ids(ctx, x), assistant.hidden(ctx, x)
        drafts.append(int(token))
    after = driver.cache.tables["kv"].tensors
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    return drafts


def their_drafts(target: Any, assistant: Any, ids: list[int]) -> list[int]:
    # A window is taken to be two tokens longer there than what the model keeps for the token that comes next.
    assistant.model.config.sliding_window = WINDOW - 2
    assistant.generation_config.num_assistant_tokens = NUM_DRAFTS
    known = torch.tensor([ids])
    with torch.no_grad():
        outputs = target(known[:, :-1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        generator = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=1000)
        )
        drafted, _ = generator.get_candidates(known, {}, outputs, is_first_iteration=False, n_last_matches=0)
    return drafted[0, len(ids) :].tolist()


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
