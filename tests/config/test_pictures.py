"""Settings and sizes of pictures: the bounds of `--mm-cache-bytes`, the tiles of an encoder and their costs."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve
from tests.pictures import picture_config

MIB, TIB = 1024**2, 1024**4


def test_mm_cache_bytes_default_is_512_mebibytes() -> None:
    assert resolve().engine.pictures.mm_cache_bytes == 512 * MIB


@pytest.mark.parametrize(("written", "accepted"), [(MIB - 1, False), (MIB, True), (TIB, True), (TIB + 1, False)])
def test_mm_cache_bytes_is_accepted_from_1_mebibyte_to_1_tebibyte(written: int, accepted: bool) -> None:
    if accepted:
        assert resolve({"mm_cache_bytes": written}).engine.pictures.mm_cache_bytes == written
        return
    with pytest.raises(ConfigError, match=r"mm.cache.bytes"):
        resolve({"mm_cache_bytes": written})


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((2, 2), True),
        ((4, 8), True),  # of the most tokens
        ((4, 10), False),
        ((2, 16), True),  # of the longest edge
        ((2, 18), False),
        ((0, 2), False),
        ((2, 0), False),
        ((-2, 2), False),
        ((3, 4), False),
        ((4, 3), False),
    ],
)
def test_takes_tiles_of_whole_tokens_up_to_the_longest_edge_and_the_most_tokens(
    size: tuple[int, int], taken: bool
) -> None:
    assert picture_config(token_edge=2, max_edge=16, max_tokens=8).takes(size) is taken


def test_takes_the_one_size_of_an_encoder_that_has_one() -> None:
    config = picture_config(tile_size=(4, 6), token_edge=2, max_edge=2, max_tokens=1)
    assert [config.takes(size) for size in ((4, 6), (6, 4), (2, 2))] == [True, False, False]


def config(**changes: Any) -> Any:
    """An encoder of 5 layers, of which one costs 8 tokens on a tile of 4."""
    return picture_config(num_layers=5, token_edge=2, token_cost=1.0, pair_cost=0.25, **changes)


TILE = (4, 4)


@pytest.mark.parametrize(
    ("first", "budget", "stop"),
    [
        (0, 8.0, 1),
        (0, 15.9, 1),
        (0, 16.0, 2),
        (0, 0.0, 1),
        (0, 40.0, 5),
        (0, 39.9, 4),
        (3, 8.0, 4),
        (3, 1e9, 5),
        (4, 0, 5),
    ],
)
def test_layers_within_a_budget_are_as_many_as_cost_no_more_and_at_least_one(
    first: int, budget: float, stop: int
) -> None:
    assert config().layers_within(TILE, first, budget) == range(first, stop)


def test_layer_tokens_count_what_each_layer_s_attention_sees() -> None:
    assert config().layer_tokens(TILE, range(1, 4)) == 3 * 8.0
    assert config().layer_tokens(TILE, range(0)) == 0
    windows = config(seen_tokens=(1, 2, 9, 4, 4))  # a window longer than the tile sees all of it
    assert [windows.layer_tokens(TILE, range(layer, layer + 1)) for layer in range(3)] == [5.0, 6.0, 8.0]


def test_picture_config_attention_is_causal_and_positions_are_plain_unless_it_says_otherwise() -> None:
    plain = picture_config()
    assert (plain.seen_tokens, plain.longest_span, plain.mrope) == ((), 0, False)
