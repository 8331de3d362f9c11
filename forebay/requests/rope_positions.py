"""Rotary positions of prompts with pictures, for models with M-RoPE (arXiv 2409.12191, section 2.1).

A token has a temporal, a vertical and a horizontal position, which are equal for text. A picture's tokens are in the
rows and columns of its grid, all at one time. The token behind a picture continues from its largest coordinate + 1, so
a prompt takes fewer positions than it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay.memory.slots import Ids


class GridRun(NamedTuple):
    """The tokens of a picture in a prompt: rows x columns of them from `start` on, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def delta(self) -> int:
        """Return how many positions the picture takes, less its tokens: at most 0."""
        return max(self.rows, self.columns) - self.rows * self.columns


def rope_delta(runs: Sequence[GridRun]) -> int:
    """Return the addition to the place of a token behind all these pictures: at most 0."""
    return sum(run.delta for run in runs)


def rope_positions(runs: Sequence[GridRun], start: int, stop: int) -> Ids:
    """Return the positions of the prompt's tokens [start, stop), [3, stop - start]; `runs` in the prompt's order."""
    places = np.arange(start, stop)
    positions = np.tile(places, (3, 1))
    before = 0  # the delta of the pictures before the run
    for run in runs:
        own = slice(*np.clip((run.start - start, run.stop - start), 0, len(places)))
        inside = places[own] - run.start
        positions[:, own] = run.start + before + np.stack([0 * inside, inside // run.columns, inside % run.columns])
        before += run.delta
        positions[:, own.stop :] = places[own.stop :] + before
    return positions
