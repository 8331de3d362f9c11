"""The chat trace is played by the real scheduler, and what it should reuse it does."""

from __future__ import annotations

import pytest

from benchmarks.cache_trace import Player, Setup, make_trace, setups
from forebay.config.engine_config import StateStrategy


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "setup",
    [setup for setup in setups(quick=True) if setup.page_size == 1],
    ids=lambda setup: f"{setup.kind}-{setup.strategy}-{'scarce' if setup.scarce else 'enough'}",
)
def test_conversations_of_the_trace_reuse_what_they_can(setup: Setup) -> None:
    trace = make_trace(num_conversations=2, num_turns=4, shift=False, seed=0)
    played = Player(trace, setup).play()
    assert len(played.reports) == 2 * 4
    assert played.reusable > 1000
    assert played.share > (0.8 if setup.scarce and setup.kind != "tiers" else 0.99)


@pytest.mark.quick(1)
@pytest.mark.parametrize("scarce", [False, True])
def test_c19_prefix_reuse_with_kv_in_two_tiers_equals_that_without(scarce: bool) -> None:
    """C23: request by request."""
    trace = make_trace(num_conversations=3, num_turns=5, shift=True, seed=1)
    alike = {"page_size": 16, "depth": 1, "strategy": StateStrategy.EXTRA_BUFFER}
    plain, tiers = (Setup(kind=kind, scarce=kind == "tiers" and scarce, **alike) for kind in ("plain", "tiers"))
    assert Player(trace, tiers).play().reports == Player(trace, plain).play().reports
