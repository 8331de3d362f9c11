"""The chunk of a step in which others decode, by the time that the step is predicted to take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.engine.loop.mixed import LEAST_TOKENS, MEDIAN_STEPS, RECENT, MixedChunks, Recent
from forebay.scheduler.scheduler import NO_LIMIT

Cost = Callable[[int, int, int], float]


def linear(num_decodes: int, num_tokens: int, context: int) -> float:
    """A step that reads weights in 5 ms, has 1 ms for a row, 2 ms for having prompts at all, and 0.8 ms for a token."""
    return 0.005 + 0.001 * num_decodes + (0.002 + 0.0008 * num_tokens if num_tokens else 0.0)


def by_context(num_decodes: int, num_tokens: int, context: int) -> float:
    return linear(num_decodes, num_tokens, 0) + 4e-8 * num_tokens * context


def settled(cost: Cost, num_decodes: int, *, max_step_s: float | None = None, context: int = 0) -> MixedChunks:
    """With many steps measured, whose chunks are as it limits them."""
    chunks = MixedChunks(max_step_s, page_size=16)
    for _ in range(50):
        chunks.decoded(num_decodes, cost(num_decodes, 0, 0))
        num_tokens = min(96, chunks.limit(num_decodes, num_decodes, context))
        chunks.mixed(num_decodes, num_tokens, context, cost(num_decodes, num_tokens, context))
    return chunks


def test_mixed_chunks_unmeasured_have_no_limit() -> None:
    chunks = MixedChunks(None, page_size=16)
    chunks.mixed(4, 96, 0, 0.1)  # which says nothing while a decode step is unknown
    assert chunks.limit(4, 4, 0) == NO_LIMIT
    chunks.decoded(4, 0.01)
    assert chunks.limit(4, 4, 0) == NO_LIMIT
    chunks.mixed(4, 96, 0, 0.106)
    assert chunks.limit(4, 4, 0) == LEAST_TOKENS


@pytest.mark.parametrize("num_decodes", [24, 40, 64])
def test_mixed_chunks_settled_fill_the_limit_and_do_not_exceed_it(num_decodes: int) -> None:
    num_tokens = settled(linear, num_decodes).limit(num_decodes, num_decodes, 0)
    seconds, most = linear(num_decodes, num_tokens, 0), MEDIAN_STEPS * linear(num_decodes, 0, 0)
    assert 0.9 * most < seconds <= 1.001 * most


def test_mixed_chunks_max_step_is_that_of_the_operator() -> None:
    chunks = settled(linear, 8, max_step_s=0.05)
    assert 0.045 < linear(8, chunks.limit(8, 8, 0), 0) <= 0.0501
    assert settled(linear, 8, max_step_s=0.001).limit(8, 8, 0) == LEAST_TOKENS


def test_mixed_chunks_have_at_least_16_tokens_and_a_page() -> None:
    for page_size, least in ((1, 16), (16, 16), (64, 64)):
        chunks = MixedChunks(0.001, page_size=page_size)
        chunks.decoded(1, 0.006)
        chunks.mixed(1, 96, 0, 0.1)
        assert chunks.limit(1, 1, 0) == least


def test_mixed_chunks_limit_is_of_all_requests_not_of_the_few_that_decode() -> None:
    """Else few decode beside long prompts, and the fewer do the shorter were the chunks."""
    chunks = settled(linear, 32)
    chunks.decoded(2, linear(2, 0, 0))
    few, many = chunks.limit(2, 2, 0), chunks.limit(2, 32, 0)
    assert few == LEAST_TOKENS
    assert linear(2, many, 0) == pytest.approx(MEDIAN_STEPS * linear(32, 0, 0), rel=0.1)


def test_mixed_chunks_number_of_decodes_never_measured_is_extrapolated_by_tokens() -> None:
    chunks = settled(linear, 4)
    limit = chunks.limit(4, 32, 0)
    assert limit > chunks.limit(4, 4, 0)
    assert linear(4, limit, 0) <= 1.1 * MEDIAN_STEPS * linear(32, 0, 0)


def test_mixed_chunks_far_behind_in_a_context_are_shorter() -> None:
    chunks = settled(by_context, 64)
    near = chunks.limit(64, 64, 0)
    for _ in range(40):
        num_tokens = chunks.limit(64, 64, 20_000)
        chunks.mixed(64, num_tokens, 20_000, by_context(64, num_tokens, 20_000))
    far = chunks.limit(64, 64, 20_000)
    assert LEAST_TOKENS <= far < 0.6 * near
    assert by_context(64, far, 20_000) <= 1.001 * MEDIAN_STEPS * linear(64, 0, 0)
    assert chunks.limit(64, 64, 0) == near


def test_mixed_chunks_disturbed_steps_change_nothing() -> None:
    chunks = settled(linear, 32)
    before = chunks.limit(32, 32, 0)
    for _ in range(5):
        chunks.decoded(32, 1.0)
        chunks.mixed(32, before, 0, 3.0)
    assert chunks.limit(32, 32, 0) == before


def test_mixed_chunks_step_that_seems_free_is_none() -> None:
    """Noise: the prompt's step was shorter than those without one."""
    chunks = MixedChunks(None, page_size=16)
    chunks.decoded(16, 0.02)
    chunks.mixed(16, 96, 0, 0.015)
    assert LEAST_TOKENS < chunks.limit(16, 16, 0) < 2000


def test_mixed_chunks_step_of_no_time_says_nothing() -> None:
    """With a step in flight two may end at one tick of the clock."""
    chunks = MixedChunks(None, page_size=16)
    chunks.decoded(16, 0.0)
    chunks.mixed(16, 96, 0, 0.0)
    assert chunks.limit(16, 16, 0) == NO_LIMIT
    chunks.mixed(16, 96, 0, 0.08)
    assert chunks.limit(16, 16, 0) == LEAST_TOKENS


def test_medians_of_a_key_that_was_never_measured_are_those_of_the_nearest() -> None:
    medians = Recent()
    assert medians.nearest(3) is None
    for key, value in ((4, 1.0), (4, 3.0), (4, 2.0), (16, 9.0)):
        medians.add(key, value)
    assert [medians.nearest(key) for key in (1, 4, 9, 11, 99)] == [(4, 2.0)] * 3 + [(16, 9.0)] * 2
    for _ in range(RECENT):
        medians.add(4, 8.0)
    assert medians.nearest(4) == (4, 8.0)
