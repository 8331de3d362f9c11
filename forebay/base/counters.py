"""Counters: numbers that only grow, each declared once."""

from __future__ import annotations

from typing import NamedTuple


class Counter(NamedTuple):
    """A number that only grows. `name` is its key in `State.counters`; `text` describes it in /metrics, where an empty
    text leaves it out because the server reports the same quantity under a name of its own."""

    name: str
    text: str = ""
