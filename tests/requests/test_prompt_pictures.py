"""Where the tokens of a prompt's pictures stand, compared with a list of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.memory.holding import Steps
from forebay.memory.pictures import Pictures
from forebay.memory.radix_node import Tenants
from forebay.requests.pictures import Awaited, PromptPictures
from tests.pictures import TOKENS, picture, picture_config

RUNS = [[(2, TOKENS)], [(2 + TOKENS, 1), (5 + TOKENS, TOKENS - 1)]]  # the second one begins where the first ends
LENGTH = 9 + 2 * TOKENS


@pytest.fixture(scope="module")
def pictures() -> PromptPictures:
    known = Pictures(picture_config(), 100, Steps(), Tenants({}))
    return PromptPictures(known.enter("", "", [picture(1), picture(2)]), RUNS)


@pytest.mark.parametrize("start", range(LENGTH - 1))
def test_uncut_chunk_ends_in_front_of_a_run_that_it_would_cut_or_behind_the_one_it_begins_in(
    pictures: PromptPictures, start: int
) -> None:
    runs = [range(first, first + length) for of in RUNS for first, length in of]
    for stop in range(start + 1, LENGTH):
        cut = next((run for run in runs if stop - 1 in run and stop in run), None)
        expected = stop if cut is None else cut.start if cut.start > start else cut.stop
        assert pictures.uncut(start, stop) == expected


def test_spans_of_a_chunk_are_its_runs_without_what_stands_before_it(pictures: PromptPictures) -> None:
    runs = [range(first, first + length) for of in RUNS for first, length in of]
    ends = [stop for stop in range(1, LENGTH) if not any(stop - 1 in run and stop in run for run in runs)]
    for stop in ends:
        for start in range(stop):
            begins, lengths = pictures.spans(start, stop)
            parts = [range(max(run.start, start), run.stop) for run in runs if run.start < stop and run.stop > start]
            assert list(zip(begins.tolist(), lengths.tolist(), strict=True)) == [
                (part.start - start, len(part)) for part in parts
            ]


@pytest.mark.parametrize("seed", range(20))
def test_awaited_tile_is_the_one_with_the_first_position_that_is_not_planned(seed: int) -> None:
    """Tiles whose runs lie between each other, too."""
    rng = np.random.default_rng(seed)
    of_tile = rng.integers(0, 4, size=12)  # which tile each position is of; 3 is text
    tiles = [Awaited(object(), tile, np.flatnonzero(of_tile == tile)) for tile in range(3) if tile in of_tile]  # type: ignore[arg-type]
    prompt = object.__new__(PromptPictures)
    prompt._tiles = sorted(tiles, key=lambda tile: int(tile.positions[0]))
    planned = {tile for tile in range(3) if rng.random() < 0.4}
    pictures: Any = SimpleNamespace(is_planned=lambda encoding, tile: tile in planned)
    for start in range(13):
        expected = next((at for at in range(start, 12) if of_tile[at] not in {3, *planned}), None)
        found = prompt.awaited(start, pictures)
        assert (found and (found[0], found[2])) == (None if expected is None else (expected, of_tile[expected]))
