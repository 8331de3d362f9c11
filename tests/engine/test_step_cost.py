"""What a step costs whatever its length, measured from steps that ended."""

from __future__ import annotations

from random import Random

import pytest

from forebay.engine.loop.step_cost import FEW, RECENT, RECENT_DECODES, StepCost

FIXED_S, TOKEN_S = 0.027, 0.0008


def measured(cost: StepCost, lengths: list[int], *, prompts: bool, factor: float = 1.0) -> None:
    for num_tokens in lengths:
        cost.ended(num_tokens, factor * (FIXED_S + TOKEN_S * num_tokens), with_prompts=prompts)


def test_step_cost_is_unknown_until_prompts_and_decodes_were_measured() -> None:
    cost = StepCost(512)
    measured(cost, [8] * 10, prompts=False)
    assert cost.tokens == 0
    measured(cost, [500] * FEW, prompts=True)
    measured(cost, [8], prompts=False)
    assert cost.tokens == 0
    measured(cost, [500], prompts=True)
    assert cost.tokens == 0
    measured(cost, [8], prompts=False)
    assert cost.tokens > 0


@pytest.mark.parametrize("num_decodes", [1, 8, 64])
def test_step_cost_settled_is_that_of_the_machine(num_decodes: int) -> None:
    """Short prompts, whose own steps are dear, do not hide it."""
    cost = StepCost(512)
    measured(cost, [16, 500, 16, 90] * 8, prompts=True)
    measured(cost, [num_decodes] * 3, prompts=False)
    assert cost.tokens == pytest.approx(FIXED_S / TOKEN_S, rel=0.2)


def test_step_cost_disturbed_steps_hardly_change_it() -> None:
    dice, cost = Random(0), StepCost(512)
    measured(cost, [500] * RECENT, prompts=True)
    measured(cost, [8] * RECENT_DECODES, prompts=False)
    before = cost.tokens
    for _ in range(RECENT_DECODES):
        measured(cost, [8], prompts=False, factor=dice.choice([1.0, 1.0, 5.0]))
    assert cost.tokens == pytest.approx(before)


def test_step_cost_is_a_whole_chunk_at_most_and_never_less_than_nothing() -> None:
    cost = StepCost(512)
    measured(cost, [500] * 4, prompts=True)
    measured(cost, [8] * 3, prompts=False, factor=1000.0)
    assert cost.tokens == 512
    cost = StepCost(512)
    measured(cost, [500] * 4, prompts=True)
    measured(cost, [8] * 3, prompts=False, factor=0.01)
    assert cost.tokens == 0


def test_step_cost_follows_the_machine() -> None:
    cost = StepCost(512)
    measured(cost, [500] * RECENT, prompts=True)
    measured(cost, [8] * RECENT_DECODES, prompts=False)
    before = cost.tokens
    measured(cost, [8] * RECENT_DECODES, prompts=False, factor=3.0)  # longer contexts
    assert cost.tokens > 2 * before
