"""Counters are declared: a name that nobody declared is an error, not one metric more."""

from __future__ import annotations

import pytest

from forebay.scheduler.state import COUNTED, Counters
from forebay.server.metrics import _ENGINE_COUNTERS
from tests.engine.engine_fakes import fake_core


def test_a_counter_that_is_not_declared_cannot_grow() -> None:
    counters = Counters()
    counters.add("retractions")
    for wrong in ("retraction", "misses.evict", "finished."):
        with pytest.raises(KeyError, match=wrong):
            counters.add(wrong)
        with pytest.raises(KeyError, match=wrong):
            counters.with_all({wrong: 1.0})
    assert counters == {"retractions": 1}
    assert counters.with_all({"retractions": 2.0, "leaked_pages": 1.0}) == {"retractions": 3, "leaked_pages": 1}


def test_every_counter_of_the_metrics_is_one_that_the_engine_has() -> None:
    core, _ = fake_core()
    told = core.stats.frame(core.scheduler, 0.0).counters
    assert _ENGINE_COUNTERS.keys() <= COUNTED | told.keys()
