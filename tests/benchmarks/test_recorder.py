"""The benchmark of the flight recorder measures steps that are recorded."""

from __future__ import annotations

import pytest

from benchmarks import recorder


def test_recorder_benchmark_measures_steps_that_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MEASURED_STEPS", 28)
    found = recorder.measure(3)
    assert found["running"] == 3
    assert found["bytes"] > 20
