"""The program that measures a GPU works where there is none, on tiny models."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_decode
from forebay.base.cpu import this_cpu


@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_a_tiny_run_on_the_cpu_fills_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", "--tiny", "--device", "cpu", "--repeats", "1", "--steps", "2"])
    gpu_decode.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "-like" in line]
    assert [(row[0].split("-")[0].strip(), int(row[1])) for row in rows] == [
        ("llama", 1),
        ("llama", 4),
        ("falcon_h1", 1),
        ("falcon_h1", 4),
    ]
    for row in rows:
        floor, step, _, host, eager_step, eager_host = (float(cell.strip().rstrip("%")) for cell in row[2:])
        assert floor > 0
        assert 0 < host <= step
        assert 0 < eager_host <= eager_step


@pytest.mark.parametrize(("chunked", "moved"), [(False, 2.0), (True, 1.0625)])
def test_bytes_of_a_step_count_one_write_of_a_state_in_16_if_scans_are_in_chunks(chunked: bool, moved: float) -> None:
    sizes = SimpleNamespace(num_read=lambda kind: 0, num_bytes=lambda kind: 1600, kv_bytes_per_token=10)
    bench: Any = SimpleNamespace(
        spec=SimpleNamespace(tied=True),
        config=SimpleNamespace(experts=None),
        model=SimpleNamespace(weight_bytes=7000),
        engine=SimpleNamespace(types=SimpleNamespace(chunked_scans=chunked)),
        sizes=sizes,
    )
    assert gpu_decode.Bench.bytes_of_step(bench, 3, 5) == 7000 + 3 * (50 + moved * 1600)
