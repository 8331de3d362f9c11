"""Rows of options in which every two values of two options meet at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any, Final

Row = dict[str, Any]
CANDIDATES: Final = 30  # rows that are tried for each that is taken


def all_pairs(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Greedy: each row covers as many pairs that are missing as the best of some random ones. Values need not hash:
    pairs are of their indices."""
    rng = Random(seed)
    names = list(options)
    missing = {
        (a, i, b, j) for a, b in combinations(names, 2) for i in range(len(options[a])) for j in range(len(options[b]))
    }
    rows = []
    while missing:
        a, i, b, j = min(missing)
        best = max(
            (_random(rng, options) | {a: i, b: j} for _ in range(CANDIDATES)), key=lambda row: _new(row, missing)
        )
        missing -= _pairs(best)
        rows.append({name: options[name][index] for name, index in best.items()})
    return rows


def _random(rng: Random, options: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    return {name: rng.randrange(len(values)) for name, values in options.items()}


def _pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def _new(row: dict[str, int], missing: set[tuple[str, int, str, int]]) -> int:
    return len(_pairs(row) & missing)
