"""Cases in which every two values of two parameters meet at least once, instead of every value with every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from random import Random
from typing import Any, Final

Row = dict[str, Any]
Pairs = set[tuple[tuple[str, int], ...]]
CANDIDATES: Final = 30  # rows that are tried for each that is taken


def all_pairs(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Make rows that cover every pair of values of two options.

    Greedy: each row covers as many pairs that are missing as the best of some random ones. Values need not hash: pairs
    are of their indices.
    """
    rng = Random(seed)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(options, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    rows = []
    while missing:
        best = max(
            (_random(rng, options) | dict(min(missing)) for _ in range(CANDIDATES)),
            key=lambda row: len(_pairs(row) & missing),
        )
        missing -= _pairs(best)
        rows.append({name: options[name][index] for name, index in best.items()})
    return rows


def most_pairs(rows: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the indices of rows that cover every pair, the row that covers most of what is missing first.

    A value is one object: rows of a product share theirs. If several rows cover as much, the first of them is taken.
    """
    numbers: dict[tuple[str, int], int] = {}
    numbered = [
        {name: numbers.setdefault((name, id(value)), len(numbers)) for name, value in row.items()} for row in rows
    ]
    covers = [_pairs(row) for row in numbered]
    missing = set().union(*covers)
    # A row covers ever less of what is missing, so that a count on the heap is at least what it covers now.
    heap = [(-len(pairs), i) for i, pairs in enumerate(covers)]
    heapify(heap)
    kept = []
    while missing:
        promised, i = heappop(heap)
        num_new = len(covers[i] & missing)
        if num_new == -promised:
            missing -= covers[i]
            kept.append(i)
        elif num_new:
            heappush(heap, (-num_new, i))
    return kept


def _random(rng: Random, options: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    return {name: rng.randrange(len(values)) for name, values in options.items()}


def _pairs(row: Mapping[str, int]) -> Pairs:
    return {*combinations(row.items(), 2)} or {*combinations(row.items(), 1)}
