"""Where the tokens of a prompt's pictures stand, compared with a list of them."""

from __future__ import annotations

import hashlib
import struct
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.memory.holding import Steps
from forebay.memory.pictures import Pictures
from forebay.memory.radix_node import Tenants
from forebay.requests.pictures import Awaited, PromptPictures, digest_of
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


def tile_positions() -> list[list[int]]:
    """Of each tile of the two pictures, in the order of the prompt."""
    return [[at for first, length in of for at in range(first, first + length)] for of in RUNS]


def test_needed_pictures_are_those_with_a_token_from_the_start_on(pictures: PromptPictures) -> None:
    for start in range(LENGTH + 1):
        expected = [number for number, positions in enumerate(tile_positions()) if max(positions) >= start]
        assert [pictures.encodings.index(encoding) for encoding in pictures.needed(start)] == expected


@pytest.mark.parametrize("longest_span", [0, TOKENS])
def test_limit_of_a_chunk_is_in_front_of_what_has_to_be_encoded_and_cuts_no_run_of_a_span(
    pictures: PromptPictures, longest_span: int
) -> None:
    runs = [range(first, first + length) for of in RUNS for first, length in of]
    for planned in ({0, 1}, {0}, {1}, set[int]()):
        missing = [at for number, of in enumerate(tile_positions()) if number not in planned for at in of]
        known: Any = SimpleNamespace(
            is_planned=lambda encoding, tile, planned=planned: pictures.encodings.index(encoding) in planned,
            config=SimpleNamespace(longest_span=longest_span),
        )
        for start in range(LENGTH):
            for stop in range(start + 1, LENGTH + 1):
                end = awaited = min([at for at in missing if at >= start], default=LENGTH)
                end = min(end, stop)
                if longest_span and end > start:
                    cut = next((run for run in runs if end - 1 in run and end in run), None)
                    end = end if cut is None else cut.start if cut.start > start else cut.stop
                    end = start if end > awaited else end
                assert pictures.limit(start, stop, known) == end, (planned, start, stop)


def test_ids_and_rows_of_a_prompt_are_those_of_its_pictures_in_order(pictures: PromptPictures) -> None:
    tokens = array("i", range(LENGTH))
    pictures.write_ids(tokens)
    expected, rows = list(range(LENGTH)), {}
    for number, positions in enumerate(tile_positions()):
        encoding = pictures.encodings[number]
        encoding.rows = np.arange(len(positions)) * 10 + number
        for inside, at in enumerate(positions):
            expected[at], rows[at] = encoding.first_id + inside, inside * 10 + number
    assert tokens.tolist() == expected
    for start in range(LENGTH):
        for stop in range(start, LENGTH + 1):
            places, found = pictures.rows(start, stop)
            inside_chunk = [at for at in sorted(rows) if start <= at < stop]
            assert places.tolist() == [at - start for at in inside_chunk]
            assert found.tolist() == [rows[at] for at in inside_chunk]


def test_digest_is_the_sha_256_of_pixels_grid_and_sizes_as_32_bit_numbers() -> None:
    numbers = struct.pack("<6I", 1, 2, 3, 4, 5, 6)
    assert digest_of(b"abc", (1, 2), [(3, 4), (5, 6)]) == hashlib.sha256(b"abc" + numbers).digest()


def test_tiles_of_pictures_between_each_other_are_in_the_order_of_their_first_tokens() -> None:
    known = Pictures(picture_config(), 100, Steps(), Tenants({}))
    runs = [[(4, 1), (5, 2)], [(0, 1), (9, 2)]]
    prompt = PromptPictures(known.enter("", "", [picture(1), picture(2)]), runs)
    assert [tile.positions.tolist() for tile in prompt._tiles] == [[0, 9, 10], [4, 5, 6]]
    assert prompt.positions.tolist() == [0, 4, 5, 6, 9, 10]
