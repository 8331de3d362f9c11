"""Sequences that pad a step: they read row 0, page 0 and slot 0 and leave nothing behind that anybody reads (C14)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.requests.step_plan import StepPlan
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.plans import changed, column
from tests.pools.caches import all_tensors
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner

NUM_PADDED, ROUND = 3, 20
CASES = ("falcon_h1", "qwen3_next", "jamba", "lfm2", "gpt_oss")


def padded(plan: StepPlan) -> StepPlan:
    """The same step with sequences of the padding row behind it, which are sampled from as all decodes are."""
    zeros, ones = np.full(NUM_PADDED, PAD, dtype=np.int64), np.ones(NUM_PADDED, dtype=np.int64)
    columns = {"rows": zeros, "q_lens": ones, "sample_mask": ones > 0, "state_slots": zeros}
    return changed(plan, **{name: np.concatenate([column(plan, name), more]) for name, more in columns.items()})


def one_round(plans: HybridPlanner, change: Callable[[StepPlan], StepPlan]) -> tuple[list[object], list[Tensor]]:
    """Two requests in rows and slots that others have used: what rows 1 and 2 sampled, and their states at the end."""
    for row, length in ((1, 5), (2, 9)):
        plans.begin(row, random_ids(length, seed=row))
    steps = [([(1, 5), (2, 4)], []), ([(2, 5)], [1]), *[([], [2, 1])] * (ROUND - 2)]
    sampled: list[object] = []
    for extends, decodes in steps:
        plan = plans.plan(extends, decodes)
        result, live = plans.runner.launch(change(plan)).result(), int(plan.sample_mask.sum())
        sampled.append((result.token_ids[:live], result.logprobs and result.logprobs[:live]))
    for row in (1, 2):
        plans.leave(row)
    return sampled, [tensor[1:3].clone() for tensor in plans.runner.cache.tables["state"].tensors]


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_rounds", [4, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_live_rows_do_not_notice_padded_sequences_nor_what_the_padding_holds(case, num_rounds, native_ops):
    """C14: slot 0 stays finite; and nobody reads page 0 or slot 0, were they not."""
    model = models.load(open_checkpoint(shared_tiny(case).path), ops=native_ops, dtype=torch.float32)
    plans = HybridPlanner(hybrid_runner(model, vocab_size=VOCAB))
    sampled, states = one_round(plans, lambda plan: plan)
    for i in range(num_rounds):
        again, states_again = one_round(plans, padded)
        assert again == sampled, f"round {i}"
        assert all(torch.equal(*pair) for pair in zip(states_again, states, strict=True)), f"round {i}"
    cache = plans.runner.cache
    assert all(tensor[PAD].isfinite().all() for tensor in all_tensors(cache))
    for tensor in all_tensors(cache):
        tensor[PAD] = float("nan")
    assert one_round(plans, padded)[0] == sampled
    plans.runner.warm_up()
    assert not any(tensor[PAD].any() for tensor in cache.tables["state"].tensors)
    assert one_round(plans, lambda plan: plan)[0] == sampled
