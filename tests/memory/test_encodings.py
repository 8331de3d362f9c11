"""Which encodings keep rows: tenants share them by their weights (C32), and what is in use stays (C8)."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.engine_config import Ledger
from forebay.memory.encodings import Encoding, EncodingRows
from forebay.memory.radix_node import IDLE_S, Tenants
from tests.pictures import SIZE, TOKENS, picture_config

WEIGHTS = {"a": 1, "b": 1, "c": 2}


class Rows(EncodingRows):
    """Rows whose encodings are named by what they show; each block has those of one tile."""

    def __init__(self, num_blocks: int, tenants: Tenants | None = None) -> None:
        super().__init__(picture_config(num_blocks), tenants or Tenants(WEIGHTS), ledger=Ledger.RAISE)
        self.made: list[Encoding] = []

    def make(self, num_tiles: int = 1) -> Encoding:
        number = len(self.made) + 1
        key = "", b"", (1, number), (SIZE,) * num_tiles
        self.made.append(Encoding(key=key, number=number, num_tokens=TOKENS * num_tiles, tiles=[]))
        return self.made[-1]

    def show(self, tenant: str, *sizes: int) -> list[Encoding]:
        """Take rows for new pictures of so many tiles, one after the other, and return them."""
        found = [self.make(size) for size in sizes]
        for its in found:
            assert self.take([its], tenant, ()) is not None
        self.audit()
        return found

    def held(self, tenant: str) -> int:
        return self.shares.held[tenant]


def placed(encodings: list[Encoding]) -> list[bool]:
    return [len(its.blocks) > 0 for its in encodings]


def test_c32_tenant_that_floods_the_encodings_evicts_its_own() -> None:
    rows = Rows(10)
    others, own = rows.show("b", 1, 2), rows.show("a", *[1] * 20)
    assert placed(others) == [True, True]
    assert placed(own) == [False] * 13 + [True] * 7


def test_c32_tenant_below_its_share_takes_rows_from_the_one_above() -> None:
    rows = Rows(8)
    flood = rows.show("a", *[1] * 8)
    rows.show("b", *[1] * 12)
    assert (rows.held("a"), rows.held("b")) == (4, 4)
    assert placed(flood) == [False] * 4 + [True] * 4


def test_c32_rows_of_encodings_are_shared_by_weight() -> None:
    rows = Rows(9)
    rows.show("a", *[1] * 9)
    rows.show("c", *[1] * 20)
    rows.show("a", *[1] * 20)
    assert (rows.held("a"), rows.held("c")) == (3, 6)


def test_c32_what_a_tenant_takes_counts_against_it() -> None:
    """Both have their half: the one that takes more loses its own, whatever its name."""
    rows = Rows(8)
    others, own = rows.show("b", 2, 2), rows.show("a", 1, 1, 2)
    (large,) = rows.show("a", 4)
    assert placed([*others, *own, large]) == [True, True, False, False, False, True]


def test_c32_encoding_that_another_tenant_uses_is_charged_to_that_one() -> None:
    rows = Rows(4)
    (shared,) = rows.show("a", 1)
    assert rows.take([shared], "b", ()) == []
    assert (rows.held("a"), rows.held("b")) == (0, 1)
    flood = rows.show("a", *[1] * 8)
    assert placed([shared, *flood[-3:]]) == [True] * 4


def test_encoding_used_again_is_evicted_behind_others() -> None:
    rows = Rows(3)
    first, second, third = rows.show("a", 1, 1, 1)
    rows.take([first], "a", ())
    rows.show("a", 1)
    assert placed([first, second, third]) == [True, False, True]


def test_c32_tenant_idle_for_an_hour_loses_its_encodings_first() -> None:
    tenants = Tenants(WEIGHTS)
    rows = Rows(4, tenants)
    tenants.use("b", 0.0)
    idle = rows.show("b", 1, 1)
    tenants.use("a", IDLE_S + 1)
    own = rows.show("a", 1, 1, 1)
    assert placed([*idle, *own]) == [False, True, True, True, True]


@pytest.mark.parametrize("short", [True, False])
def test_c8_rows_of_prompts_under_way_stay(short: bool) -> None:
    rows = Rows(4)
    used, idle = rows.show("a", 2), rows.show("b", 2)
    taken = rows.take([wanted := rows.make(3 if short else 2)], "a", used)
    assert taken == (None if short else idle)
    assert placed([*used, *idle, wanted]) == [True, short, not short]
    rows.audit()


def test_clear_frees_all_blocks() -> None:
    rows = Rows(4)
    found = rows.show("a", 2, 1)
    rows.clear()
    assert placed(found) == [False, False]
    assert rows.slots.num_free == 4
    rows.show("b", 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_blocks=st.integers(3, 10))
def test_c32_tenant_loses_encodings_only_while_it_holds_the_most_of_those_that_could_lose(data, num_blocks) -> None:
    """Encodings of one block: of those not in use, each evicted one was of a tenant that then held the most."""
    rows = Rows(num_blocks)
    for _ in range(data.draw(st.integers(1, 25))):
        tenant = data.draw(st.sampled_from("abc"))
        known = data.draw(st.lists(st.sampled_from(rows.made), max_size=2, unique=True)) if rows.made else []
        wanted = [*known, *(rows.make() for _ in range(data.draw(st.integers(0, 3))))]
        in_use = data.draw(st.sets(st.sampled_from(rows.made), max_size=2)) if rows.made else set()
        in_use = {its for its in in_use if len(its.blocks)}
        before = {its: its.tenant for its in rows}
        evicted = rows.take(wanted, tenant, in_use)
        rows.audit()
        if evicted is None:
            assert {its: its.tenant for its in rows} == before, "what does not fit changes something"
            assert len(in_use.union(wanted)) > num_blocks
            continue
        assert all(placed(wanted))
        assert not in_use.intersection(evicted)
        _check_turns(Counter((before | dict.fromkeys(wanted, tenant)).values()), evicted, before, in_use.union(wanted))


def _check_turns(held: Counter[str], evicted: list[Encoding], before: dict[Encoding, str], kept: set[Encoding]) -> None:
    left = [its for its in before if its not in kept]
    for its in evicted:
        loads = {tenant: Fraction(held[tenant], WEIGHTS[tenant]) for tenant in {before[other] for other in left}}
        assert loads[before[its]] == max(loads.values()), (held, loads, its.number)
        left.remove(its)
        held[before[its]] -= 1
