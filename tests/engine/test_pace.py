"""How long a step may take: what is known of others like it."""

from __future__ import annotations

from forebay.engine.loop.core import STEP_LIMIT_S, Pace

MOST_S = 60.0


def test_before_a_step_has_ended_and_while_none_can_be_planned_the_stall_timeout_holds() -> None:
    pace = Pace(MOST_S)
    assert pace.limit_s(1) == pace.limit_s(512) == MOST_S
    pace.ended(1, 0.01)
    assert pace.limit_s(0) == MOST_S


def test_a_hang_is_seen_after_seconds_where_steps_are_short() -> None:
    pace = Pace(MOST_S)
    pace.ended(20, 0.05)
    pace.ended(1, 0.01)
    assert pace.limit_s(1) == pace.limit_s(64) == pace.limit_s(512) == STEP_LIMIT_S


def test_a_long_prompt_on_a_slow_machine_is_no_hang() -> None:
    """Five tokens took a second: 200 may take 40, and 512 as long as anything may."""
    pace = Pace(MOST_S)
    pace.ended(5, 1.0)
    assert pace.limit_s(200) == 40.0
    assert pace.limit_s(512) == MOST_S
    assert pace.limit_s(8) == STEP_LIMIT_S


def test_no_step_may_take_longer_than_the_stall_timeout() -> None:
    pace = Pace(1.0)
    pace.ended(1, 5.0)
    assert pace.limit_s(512) == 1.0
