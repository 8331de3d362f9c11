"""What the captured steps of the engine hold in their padded rows (C13, C14)."""

from __future__ import annotations

import pytest
import torch

from forebay import models
from forebay.config.engine_config import CacheTypes
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.budget import PoolSizes
from forebay.memory.slots import PAD
from forebay.pools.regions import Regions
from forebay.requests.step_plan import StepResult
from forebay.runtime.build import build_runner
from forebay.runtime.graphs.backends import CpuGraphs
from forebay.runtime.steps.decode import DecodeInputs
from forebay.runtime.steps.extend import ExtendInputs, KindTokens, Sequences, Tokens
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import fake_runner, planner
from tests.runtime.graph_steps import poison

LIVE, PADDED = 2, 5


def live_values(table: type, n: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((n,), 9, dtype=column.dtype) for name, column in table.declared.items()}


def test_c13_a_padded_row_of_a_decode_step_is_nobodys():
    inputs = DecodeInputs(PADDED)
    poison(inputs)
    inputs.fill(live_values(DecodeInputs, LIVE), LIVE, PADDED)
    padded = inputs.head(PADDED)
    assert {name: set(padded[name][LIVE:].tolist()) for name in padded.declared} == {
        "req_pool_indices": {0},
        "state_slots": {0},
        "mamba_track_indices": {0},
        "mamba_track_lens": {0},
    }
    assert all((padded[name][:LIVE] == 9).all() for name in padded.declared)


def test_c13_padded_tokens_of_a_step_with_prompts_are_nobodys():
    inputs = ExtendInputs(Tokens(PADDED), Sequences(PADDED), KindTokens(PADDED))
    poison(inputs.tokens)
    poison(inputs.sequences)
    poison(inputs.kinds)
    live = live_values(Tokens, LIVE) | live_values(Sequences, LIVE) | live_values(KindTokens, 1)
    inputs.fill(live, LIVE, PADDED)
    padded = inputs.head(PADDED)
    assert {name: set(padded.tokens[name][LIVE:].tolist()) for name in Tokens.declared} == {"input_ids": {0}}
    assert set(padded.sequences["req_pool_indices"][LIVE:].tolist()) == {0}
    assert set(padded.sequences["q_ends"][LIVE:].tolist()) == {PADDED}, (
        "the first padded sequence has all padded tokens"
    )
    assert padded.sequences.q_start.tolist() == [0, *padded.sequences["q_ends"].tolist()]
    assert set(padded.sequences["state_slots"][LIVE:].tolist()) == {0}
    assert set(padded.kinds["snap_slots"][1:].tolist()) == {0}, "no snapshot"
    assert set(padded.sequences["snap_stops"][LIVE:].tolist()) == {PADDED}, "the first padded sequence has all of those"
    assert padded["snap_start"].tolist() == [0, *padded.sequences["snap_stops"].tolist()]


@pytest.mark.parametrize("spoiled", [False, True])
def test_c14_a_captured_decode_step_begins_by_resetting_the_padding_row(spoiled, native_ops):
    """Else what one replay leaves in row 0 is where the next one begins."""
    model = models.load(open_checkpoint(shared_tiny("llama").path), ops=native_ops, dtype=torch.float32)
    runner = hybrid_runner(
        model, vocab_size=VOCAB, ops=native_ops, graphs=CpuGraphs(native_ops, Regions()), graph_sizes=[PADDED]
    )
    plans = HybridPlanner(runner)
    for row in (1, 2):
        plans.begin(row, random_ids(4, seed=row))
    plans.step(extends=[(1, 4), (2, 4)])
    sampled: list[StepResult] = []
    left = set()
    for _ in range(4):
        if spoiled:
            runner.rows.last_tokens[PAD] = VOCAB - 1
        sampled.append(plans.step(decodes=[1, 2]))
        assert len(runner.decode.captured.graphs) == 1
        left.add(int(runner.rows.last_tokens[PAD]))
    assert len(left) == 1, "the padding row begins with the same token each time"
    alone = HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, ops=native_ops))
    for row in (1, 2):
        alone.begin(row, random_ids(4, seed=row))
    alone.step(extends=[(1, 4), (2, 4)])
    assert [alone.step(decodes=[1, 2]).token_ids for _ in range(4)] == [result.token_ids for result in sampled]


def test_c14_the_padding_row_grows_in_no_captured_step(native_ops):
    """Its length is what one step's padding comes to, however often steps are replayed, and whatever it was before."""
    plans = planner(fake_runner())
    runner = plans.runner
    for _ in range(4):
        runner.rows.kv_lens[PAD] = 7
        plans.admit(1, [1, 2, 3])
        plans.step(extends=[(1, 3)])
        assert runner.rows.kv_lens[PAD] == runner.extend.captured.sizes[0] - 3
        for _ in range(3):
            plans.step(decodes=[1])
        assert runner.rows.kv_lens.tolist()[:2] == [0, 6]
        runner.decode.captured.sizes = [PADDED]
        plans.step(decodes=[1])
        assert runner.rows.kv_lens.tolist()[:2] == [1, 7]
        runner.decode.captured.sizes = [1]


def test_a_capture_computes_nothing(native_ops):
    """So that no request waits for one: it takes as long as the step's Python, whatever the step's size."""
    model = models.load(open_checkpoint(shared_tiny("llama").path), ops=native_ops, dtype=torch.float32)
    runner = build_runner(
        model,
        sizes=PoolSizes(num_slots={"kv": 16}, page_size=4, max_running_requests=PADDED, context_length=32),
        ops=native_ops,
        max_num_tokens=32,
        vocab_size=VOCAB,
        types=CacheTypes(),
        device="cpu",
    )
    written = [*runner.cache.tables["kv"].tensors, runner.rows.last_tokens]
    for tensor in written:
        tensor.fill_(5)
    num_captured = 0
    while runner.capture_next():
        num_captured += 1
    assert num_captured > 1
    assert runner.extend.captured is not None
    assert runner.extend.captured.graphs
    assert all((tensor == 5).all() for tensor in written)
