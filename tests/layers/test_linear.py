"""Layers reach the ops of linear layers through `Linear` alone."""

from __future__ import annotations

from pathlib import Path

import forebay.layers


def test_linear_layers_are_run_in_one_place():
    folder = Path(forebay.layers.__file__).parent
    calls = {path.name: path.read_text().count("ops.linear.apply(") for path in folder.glob("*.py")}
    assert {name: count for name, count in calls.items() if count} == {"linear.py": 1}
