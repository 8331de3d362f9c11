"""The router before servers that come and go, seed after seed (C22, C27).

More seeds: `python -m tests.simulation.routing --seeds 0:10000 --jobs 2`.
"""

from __future__ import annotations

import pytest

from tests.simulation.routing import RoutingOutcome, main, run_routing

QUICK = range(8)
SLOW = [pytest.param(range(first, first + 20), marks=pytest.mark.slow) for first in range(0, 2000, 20)]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "forebay.route")


@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=str)
def test_c27_router_requests_end_once_and_reach_no_server_that_must_get_none(seeds: range) -> None:
    outcome = sum(map(run_routing, seeds), RoutingOutcome(seeds=0))
    # The traffic must be of the kind that finds bugs: much of it well, and much hurt.
    num_requests = outcome.answered + outcome.failed + outcome.left
    assert outcome.answered >= num_requests // 2
    assert min(outcome.failed, outcome.retries, outcome.prefixes) >= num_requests // 20
    assert outcome.refused_announcements > 0


def test_routing_simulation_of_one_seed_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0
    assert run_routing(3).digest in capsys.readouterr().out
