"""Recorded simulations are replayed to the same plans; a record that is missing is noticed (C19, C27)."""

from __future__ import annotations

from functools import cache

import pytest

from forebay.engine.recorder.hidden import Hidden
from forebay.engine.recorder.recorder import decode_all
from forebay.memory.adapters import AdapterChanged
from forebay.scheduler.journal import Aborted, Added, Committed, Expired, Halted, Record, Transferred
from tests.simulation.recorded import SECRET, Recording, Replayed, record_seed, replay_of, run_seed

SHORT = (
    0,
    2,
    3,
    194,
    26,
    12,
    22,
)  # an engine, pairs (the last one with pictures), pictures, adapters, a sleeping engine


@cache
def recorded(seed: int) -> list[Recording]:
    return record_seed(seed)


@pytest.mark.parametrize("seed", SHORT)
def test_replay_recorded_simulation_decides_the_same_plans(seed: int) -> None:
    assert sum(sim.replayed.plans for sim in recorded(seed)) > 0


def test_replay_recorded_simulations_had_everything_that_is_counted() -> None:
    total = sum((sim.replayed for seed in SHORT for sim in recorded(seed)), Replayed(seeds=0))
    assert not [name for name, count in vars(total).items() if not count and name != "seeds"], total


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 25))
def test_replay_500_recorded_simulations_decide_the_same_plans(first: int) -> None:
    for seed in range(first, first + 25):
        run_seed(seed)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [Aborted, Added, Committed, Expired, Transferred, Halted, AdapterChanged])
def test_replay_without_records_of_a_kind_differs(kind: type[Record]) -> None:
    found = []
    for sim in [sim for seed in SHORT for sim in recorded(seed)]:
        records = decode_all(sim.data)
        others = [record for record in records if not isinstance(record, kind)]
        if len(others) < len(records):
            assert replay_of(sim, records).difference is None
            found.append(replay_of(sim, others).difference is not None)
    assert any(found), found


def test_hidden_records_have_no_token_and_equal_prefixes_stay_equal() -> None:
    sim = recorded(0)[0]
    records = decode_all(sim.data)
    hidden = [*Hidden(sim.origin, SECRET).all(records)]
    pairs = [
        (memoryview(a.tokens).cast("i").tolist(), memoryview(b.tokens).cast("i").tolist())
        for a, b in zip(records, hidden, strict=True)
        if isinstance(a, Added) and isinstance(b, Added)
    ]
    for tokens, own in pairs:
        assert not {token for token in own if token < 1 << 16} & set(tokens)
        assert len(set(own)) == len(own)  # equal tokens at different places differ
        for others, theirs in pairs:
            common = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
            length = min(len(tokens), len(others)) if common is None else common
            assert own[:length] == theirs[:length]
            assert common is None or own[common] != theirs[common]


def test_hidden_records_of_two_keys_have_no_hash_in_common() -> None:
    sim = recorded(0)[0]
    records = decode_all(sim.data)
    first, second = (
        {
            token
            for record in Hidden(sim.origin, key).all(records)
            if isinstance(record, Committed)
            for token in record.token_ids
        }
        for key in (SECRET, SECRET[::-1])
    )
    assert first
    assert not first & second
