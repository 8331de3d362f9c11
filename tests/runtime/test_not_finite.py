"""What a step leaves in the caches is finite, or its sequence is said to have failed (C30, decision 0014)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.runtime.conftest import made
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import CONTEXT, FakeModel, fake_runner, planner
from tests.runtime.test_model_runner import BAD_TOKEN, WISHES, prompt

INF, NAN = float("inf"), float("nan")
# Every kind of attention and of recurrence, and every way in which layers share a block.
CASES = (
    "llama",
    "falcon_h1",
    "jamba",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v3",
    "deepseek_v32",
    "mamba2",
    "lfm3",
    "gpt_oss",
    "zamba2",
)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_chunk_that_samples_nothing_is_looked_at_as_well(wish: str, bad: float) -> None:
    model = FakeModel()
    plans = planner(fake_runner(model))
    for row in range(1, 5):
        tokens = prompt(row, 12)
        tokens[3] = BAD_TOKEN if row in (2, 4) else tokens[3]
        plans.admit(row, tokens, WISHES[wish])
    assert plans.step(extends=[(row, 2) for row in range(1, 5)]).failed == ()
    model.poison = {BAD_TOKEN: bad}
    result = plans.step(extends=[(1, 10), (2, 5), (3, 5), (4, 10)])
    assert result.failed == (1, 3)
    assert len(result.token_ids) == 2
    assert plans.step(extends=[(3, 5)], decodes=[1]).failed == ()


def test_the_check_is_part_of_the_captured_step() -> None:
    """C13: the same flags eager, captured and replayed, of steps that padding makes larger."""
    for captured in (True, False):
        model = FakeModel()
        model.poison = {BAD_TOKEN: NAN}
        plans = planner(fake_runner(model))
        if not captured:
            plans.runner.extend.captured = None
        for _ in range(4):
            for row in (1, 2, 3):
                plans.admit(row, prompt(row, CONTEXT - 4), WISHES["greedy"])
                plans.prompts[row][4] = BAD_TOKEN if row == 2 else 5
            assert plans.step(extends=[(row, 6 + row) for row in (1, 2, 3)]).failed == (1,)
        assert not captured or plans.runner.extend.captured.graphs


@pytest.fixture(scope="module")
def paths() -> Callable[[str], Path]:
    return lambda case: shared_tiny(case).path


@pytest.fixture(params=[NATIVE, "torch"])
def make_plans(request: pytest.FixtureRequest, paths: Callable[[str], Path]) -> Callable[..., HybridPlanner]:
    ops = made(request.param)

    def make(case: str, dtype: torch.dtype) -> HybridPlanner:
        model = models.load(open_checkpoint(paths(case)), ops=ops, dtype=dtype)
        return HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, dtype=dtype, ops=ops))

    return make


def _spoiled(plans: HybridPlanner, row: int) -> Iterator[Tensor]:
    """One entry of each state that the row goes on from, after each other."""
    for tensor in plans.runner.cache.tables["state"].tensors:
        state = tensor[plans.slots[row]].view(-1)
        at = len(state) // 2
        before = state[at].clone()
        yield state[at]
        state[at] = before


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
def test_a_state_that_is_not_finite_shows_in_the_very_next_token(case: str, make_plans: Any) -> None:
    """So a state that a step leaves, and whose tokens' hidden states are finite, is finite itself."""
    for bad in (NAN, INF, -INF):
        plans = make_plans(case, torch.float32)
        for row in (1, 2):
            plans.begin(row, random_ids(12, seed=row))
        assert plans.step(extends=[(1, 6), (2, 12)]).failed == ()
        for entry in _spoiled(plans, 1):
            entry.fill_(bad)
            plans.lens[1] = 6
            before = [tensor[plans.slots[1]].clone() for tensor in plans.runner.cache.tables["state"].tensors]
            assert plans.step(extends=[(1, 1)], decodes=[2]).failed == (0,)
            for tensor, state in zip(plans.runner.cache.tables["state"].tensors, before, strict=True):
                tensor[plans.slots[1]] = state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_key_or_value_that_is_not_finite_shows_in_its_own_step(
    case: str, dtype: torch.dtype, make_plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any layer, whatever its scores come to: one key of -inf, and nothing else, for one token of a chunk."""
    plans = make_plans(case, dtype)
    ops = plans.runner._ops
    calls: list[int] = []
    target: list[int] = []

    def spoiling(name: str) -> None:
        store = getattr(ops.attention, name)

        def spoil(*args: Tensor, **options: Any) -> None:
            k = args[0] if name == "store_kv" else args[1]
            calls.append(len(calls))
            if target and calls[-1] == target[0]:
                k[4, 0, -1] = -INF
            store(*args, **options)

        monkeypatch.setattr(ops.attention, name, spoil)

    plans.runner.extend.captured = None
    spoiling("rope_and_store_kv")
    if ops.name != "torch":  # the reference's fused op calls the plain one
        spoiling("store_kv")
    for row in (1, 2):
        plans.begin(row, random_ids(12, seed=row))
    assert plans.step(extends=[(1, 6), (2, 12)]).failed == ()
    layers = len(calls)
    for layer in range(layers):
        for row in (1, 2):
            plans.begin(row, random_ids(12, seed=row))
            plans.lens[row] = 0
            plans.leave(row)
        calls.clear()
        target[:] = [layer]
        assert plans.step(extends=[(1, 6), (2, 12)]).failed == (0,)
