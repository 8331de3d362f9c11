"""Counters are declared: a name that nobody declared is an error, not one metric more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.config.engine_config import SchedulerConfig
from forebay.engine.loop.stats import Stats
from forebay.scheduler.counters import COUNTERS
from forebay.scheduler.scheduler import Scheduler
from tests.engine.engine_fakes import fake_core
from tests.kinds_of import kind_config


def test_a_counter_that_is_not_declared_cannot_grow() -> None:
    core, _ = fake_core()
    for wrong in ("retraction", "misses.evict", "finished."):
        with pytest.raises(KeyError, match=wrong):
            core.scheduler.counters[wrong] += 1


def test_counters_that_an_engine_tells_are_those_that_are_declared() -> None:
    kinds = kind_config(num_slots=64, track_interval=16)
    kinds = replace(kinds, num_slots={**kinds.num_slots, "resident": 4})
    config = SchedulerConfig(num_pages=64, max_running_requests=8, context_length=256, kinds=kinds)
    told = Stats(0.0).frame(Scheduler(config), 0.0).counters
    assert {counter.name for counter in COUNTERS} == told.keys()
