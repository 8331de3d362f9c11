"""The engine of the benchmark of host time decodes all its requests, or it would measure something else."""

from __future__ import annotations

import pytest

from benchmarks import host_overhead


@pytest.mark.parametrize(("depth", "hybrid"), [(0, False), (1, True)])
def test_host_overhead_measures_steps_that_decode_all_requests(
    depth: int, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_overhead, "MEASURED_STEPS", 8)
    assert host_overhead.measure(3, depth, hybrid) > 0
