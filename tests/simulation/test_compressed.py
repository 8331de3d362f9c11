"""Compressed KV under random traffic, faults, sleep and pairs, and whether mistakes would be found there (C24)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from forebay.config.engine_config import CacheTypes
from forebay.memory.holding import Allocation
from forebay.memory.kinds.ring.rings import Rings
from forebay.memory.slots import NO_IDS, Ids
from forebay.pools.cache_spec import BlockStates
from tests.simulation import compressed_pair
from tests.simulation.compressed import run_seeds

SEEDS = (50, 57, 58, 59)  # with blocks that overlap, host copies and pairs


@pytest.mark.long
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(600), marks=pytest.mark.slow)])
def test_compressed_kv_random_traffic_sees_the_entries_of_its_own_tokens(seeds: Iterable[int]) -> None:
    outcome = run_seeds(seeds)
    assert 0 < outcome.overlapping < outcome.entries, "all blocks overlap, or none"
    assert outcome.copied > 0 < outcome.prebuilt, "no ring came back from the host, or none from another engine"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(7, 10), pytest.param(range(400), marks=pytest.mark.slow)])
def test_compressed_kv_of_two_engines_that_sleep_gives_many_whole_answers(seeds: Iterable[int]) -> None:
    """C22, C25: with rings that are copied to the host, between engines and kept over a sleep."""
    outcome = compressed_pair.run_seeds(seeds)
    assert outcome.whole > 0.35 * outcome.pairs
    assert min(outcome.sleeps, outcome.updates, outcome.copied, outcome.prebuilt, outcome.entries) > 0


def forget_rings(rings: Rings, held: Allocation, pages: Ids, start: int = 0) -> Ids:
    return NO_IDS


def ring_of_another_row(rings: Rings, held: Allocation, pages: Ids, start: int = 0) -> Ids:
    return SLOTS(rings, held, pages, start) % rings.slots.capacity + 1


def one_place_less(states: BlockStates, types: CacheTypes) -> int:
    return RING(states, types) - 1


SLOTS, RING = Rings.transfer_slots, BlockStates.ring


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (Rings, "transfer_slots", forget_rings),
        (Rings, "transfer_slots", ring_of_another_row),
        (BlockStates, "ring", one_place_less),
    ],
    ids=["host copies without rings", "rings of other rows", "rings one place short"],
)
def test_a_mistake_about_rings_is_found(
    owner: type[object], name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(Exception, match=r"entry of other tokens|ring"):
        run_seeds(range(60))
