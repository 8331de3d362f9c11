"""The program that measures a GPU works where there is none, on tiny models."""

from __future__ import annotations

import sys

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
