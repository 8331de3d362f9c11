"""Tiny random assistants, saved by transformers, and what both draft with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from forebay.families.checkpoint import open_checkpoint
from forebay.layers.context import ForwardContext
from forebay.models import Model
from forebay.models.assistant import Assistant, load_assistant
from forebay.ops import Ops
from tests.models.cases_window import FULL, SLIDING
from tests.models.drive import Driver
from tests.models.tiny import VOCAB, make_random, shared_tiny

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


@contextmanager
def all_layers_may_share() -> Iterator[None]:
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
    with all_layers_may_share():
        oracle = make_random("gemma4_assistant", {"text_config": TEXT, **outer}, seed=7)
    if oracle.masked_embedding is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        oracle.masked_embedding.token_ordering.copy_(order)
    oracle.save_pretrained(folder)
    return oracle


def load_for(target: str, path: Path, ops: Ops) -> Assistant:
    config = open_checkpoint(shared_tiny(target).path).config
    checkpoint = open_checkpoint(path)
    return load_assistant(
        checkpoint, config, ops=ops, dtype=torch.float32, progress=lambda done, total: None, num_positions=64
    )


def behind(ctx: ForwardContext, length: int) -> ForwardContext:
    """What a query at position `length`, behind so many tokens of one row, is told."""
    q_start, seq_lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    pages = {name: replace(ctx.pages(name), q_start=q_start, seq_lens=seq_lens) for name in ("kv", "window")}
    return replace(ctx, positions=torch.tensor([length]), kinds={**ctx.kinds, **pages})


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
            assistant,
            target.get_input_embeddings(),
            GenerationConfig(max_length=1000),  # type: ignore[no-untyped-call]
        )
        candidates: Any = generator.get_candidates  # declared for tensors of the old types alone
        drafted, _ = candidates(known, {}, outputs, is_first_iteration=False, n_last_matches=0)
    found: list[int] = drafted[0, len(ids) :].tolist()
    return found
