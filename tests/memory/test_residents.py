"""Resident copies on the host: whose they are, which pages have one, and what plans tell the device (C23)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, RowTable
from forebay.memory.kinds.kind import Arrival
from forebay.memory.kinds.resident import residents
from forebay.memory.kinds.resident.residents import Residents
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import NO_IDS, Ids

PAGE = 4


class Rig:
    """Rows, and a request in each that has pages 1, 2, 3 and so on."""

    def __init__(self, num_copies: int, *, num_pages: int = 12) -> None:
        self.rows = ReqToTokenPool(3, 64, page_size=PAGE)
        self.residents = Residents(num_copies, num_pages, self.rows)
        self.table = RowTable(self.rows.slots.num_rows, PAGE)
        self.draft = Draft(1, self.rows)

    def admit(self, request_id: int, pages: list[int], *, num_cached: int = 0, elsewhere: bool = False) -> Allocation:
        known = len(pages) * PAGE + (num_cached == len(pages))  # the last token is always computed
        held = Allocation(self.table, request_id, SimpleNamespace(num_pages=num_cached), known)  # type: ignore[arg-type]
        self.rows.alloc([held])
        kv_len = num_cached * PAGE
        self.table.move_in(held, max_kv_len=64, num_pages=len(pages), kv_len=kv_len, kv_committed=kv_len)
        self.rows.req_to_token[held.row, : len(pages)] = pages
        self.residents.admit(held, Arrival(len(pages) * PAGE, elsewhere), self.draft)
        return held

    def columns(self) -> dict[str, list[int]]:
        return {name: ids.tolist() for name, ids in self.residents.columns(self.draft, NO_IDS).items()}

    def copies(self, *pages: int) -> list[bool]:
        mapping = self.residents.full_to_hisparse_device_index_mapping
        return [bool(mapping[page]) for page in pages]


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int64)


def test_pages_of_a_hit_are_loaded_at_admission_and_new_ones_are_not() -> None:
    rig = Rig(8)
    rig.admit(5, [3, 7, 9], num_cached=2)
    columns = rig.columns()
    assert columns["load_pages"] == [3, 7]
    assert columns["resident_pages"] == [3, 7, 9]
    assert columns["resident_slots"] == [*columns["load_slots"], 0]
    assert rig.columns() == {}


def test_a_hit_is_loaded_only_if_the_tokens_behind_it_read_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "_READ_PER_TOKEN", 2)
    rig = Rig(8)
    rig.admit(5, [3, 7, 9, 11], num_cached=3)
    assert rig.columns() == {"resident_pages": [3, 7, 9, 11], "resident_slots": [0] * 4}
    rig.admit(6, [3, 7, 9, 11, 12], num_cached=3)
    assert rig.columns()["load_pages"] == [3, 7, 9]


def test_what_comes_from_elsewhere_has_no_copies_and_the_device_learns_that() -> None:
    rig = Rig(8)
    rig.admit(5, [3, 7], num_cached=1, elsewhere=True)
    assert rig.columns() == {"resident_pages": [3, 7], "resident_slots": [0, 0]}


def test_pages_of_a_chunk_get_copies_as_far_as_there_are_some() -> None:
    rig = Rig(4)
    other = rig.admit(6, [4, 6], num_cached=2)
    held = rig.admit(5, [3, 7, 9, 11])
    rig.residents.extend(held, 2 * PAGE + 1, rig.draft)
    assert rig.copies(3, 7, 9, 11) == [True, True, False, False]
    held.kv_bound = 2 * PAGE + 1
    holding = rig.residents.release_all(other)
    rig.residents.return_slots(holding, other.id)
    rig.residents.extend(held, 4 * PAGE, rig.draft)
    assert rig.copies(9, 11) == [False, True], "a copy of page 9 would lack the token that is there already"
    assert rig.columns()["resident_pages"] == [3, 4, 6, 7, 9, 11]


def test_a_request_that_decodes_frees_its_copies_once_and_gets_a_hot_buffer() -> None:
    rig = Rig(4)
    held = rig.admit(5, [3, 7], num_cached=1)
    rig.columns()
    for _ in range(2):
        rig.residents.decode(rig.table, ids(held.row), 0, rig.draft)
    assert rig.residents.slots.num_free == 4
    columns = rig.columns()
    assert columns["hot_rows"] == [held.row]
    assert columns["resident_slots"] == [0]
    rig.residents.decode(rig.table, ids(held.row), 0, rig.draft)
    assert rig.columns() == {}


def test_a_copy_is_of_the_request_that_took_it_and_others_read_it_meanwhile() -> None:
    rig = Rig(4)
    first, second = rig.admit(5, [3], num_cached=1), rig.admit(6, [3, 7], num_cached=1)
    assert [len(rig.residents.holder(held).ids) for held in (first, second)] == [1, 0]
    rig.columns()
    holding = rig.residents.release_all(first)
    assert rig.columns() == {"resident_pages": [3], "resident_slots": [0]}, "the second reads the host tier now"
    rig.residents.return_slots(holding, first.id)
    assert rig.residents.slots.num_free == 4


def test_a_page_that_is_given_up_loses_its_copy() -> None:
    """Whoever gets the page next must not read what was there."""
    rig = Rig(4)
    held = rig.admit(5, [3, 7], num_cached=2)
    holding = rig.residents.release_pages(ids(7, 9))
    assert holding is not None
    assert len(holding.ids) == 1
    assert rig.copies(3, 7) == [True, False]
    assert rig.residents.release_pages(ids(9)) is None
    rig.residents.return_slots(holding, held.id)
    assert len(rig.residents.holder(held).ids) == 1
    rig.residents.check([])


def test_copies_move_to_cached_pages_that_have_none() -> None:
    rig = Rig(4)
    held = rig.admit(5, [3, 7], num_cached=2)
    other = rig.admit(6, [8], num_cached=1)
    slot = int(rig.residents.full_to_hisparse_device_index_mapping[3])
    rig.residents.replaced([], ids(5, 8), ids(3, 7), held.id)
    assert rig.residents.full_to_hisparse_device_index_mapping[5] == slot
    assert rig.copies(3, 7, 8) == [False, True, True]
    assert [len(rig.residents.holder(one).ids) for one in (held, other)] == [2, 1]
    assert {3, 5, 7, 8} <= set(rig.columns()["resident_pages"])
    rig.residents.check([])


def test_loads_of_a_request_that_left_meanwhile_are_not_planned() -> None:
    rig = Rig(4)
    held = rig.admit(5, [3], num_cached=1)
    rig.residents.release_all(held)
    assert "load_pages" not in rig.columns()


def test_clear_forgets_copies_and_changes() -> None:
    rig = Rig(4)
    held = rig.admit(5, [3, 7], num_cached=2)
    rig.residents.decode(rig.table, ids(held.row), 0, rig.draft)
    rig.admit(6, [9], num_cached=1)
    rig.residents.clear()
    assert rig.columns() == {}
    assert rig.residents.slots.num_free == 4
    assert rig.copies(3, 7, 9) == [False] * 3


def test_a_copy_that_no_request_holds_is_found() -> None:
    rig = Rig(4)
    rig.residents.full_to_hisparse_device_index_mapping[3] = 2
    with pytest.raises(AssertionError, match="held by no request"):
        rig.residents.check([])


def test_counts_of_the_device_are_the_counters() -> None:
    counted: Any = Rig(1).residents
    assert counted.counters == {"hisparse_read_tokens": 0, "hisparse_loaded_tokens": 0}
    assert counted.count(ids(90, 7))
    assert not counted.count(ids(120, 7))
    assert counted.count(ids(130, 8))
    assert counted.counters == {"hisparse_read_tokens": 130, "hisparse_loaded_tokens": 8}
