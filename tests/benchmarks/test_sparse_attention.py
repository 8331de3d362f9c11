"""The program that compares dense and sparse attention works, on tiny models."""

from __future__ import annotations

import sys

import pytest

from benchmarks import sparse_attention
from forebay.base.cpu import this_cpu


@pytest.mark.slow
@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_a_tiny_run_has_a_row_for_each_context(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["sparse_attention.py", "--tiny"])
    sparse_attention.main()
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(32, 2), (64, 2)]
    assert all(float(row[4].strip().rstrip("x")) > 0 for row in rows)
