"""Request rows (C1, C2)."""

import pytest

from forebay.config.engine_config import Ledger
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool
from forebay.memory.slots import PAD, LedgerError, OutOfSlots


class Req:
    def __init__(self, id: int) -> None:
        self.id = id
        self.row = PAD


def reqs(n: int) -> list[Req]:
    return [Req(i + 1) for i in range(n)]


def test_c1_rows_are_one_to_size_and_the_table_has_one_row_more():
    pool = ReqToTokenPool(4, 10, page_size=4)
    assert pool.req_to_token.shape == (5, 3)
    assert sorted(pool.alloc(reqs(4))) == [1, 2, 3, 4]


def test_c1_rows_come_in_request_order_and_a_row_already_held_is_kept():
    pool = ReqToTokenPool(4, 10)
    a, b, c = reqs(3)
    (row,) = pool.alloc([b])
    assert pool.alloc([a, b, c]) == [a.row, row, c.row]
    assert pool.available_size() == 1


def test_c1_alloc_is_all_or_nothing():
    pool = ReqToTokenPool(2, 10)
    three = reqs(3)
    with pytest.raises(OutOfSlots):
        pool.alloc(three)
    assert pool.available_size() == 2
    assert all(req.row == PAD for req in three)


def test_c1_asking_for_none_returns_none():
    pool = ReqToTokenPool(2, 10)
    assert pool.alloc([]) == []
    assert pool.available_size() == 2


def test_c1_a_freed_row_is_zero_and_its_generation_tells_the_next_tenant_apart():
    pool = ReqToTokenPool(1, 4)
    first, second = reqs(2)
    (row,) = pool.alloc([first])
    pool.req_to_token[row, 1:3] = [7, 8]
    assert pool.pages(row, 1, 3).tolist() == [7, 8]
    before = pool.generation[row]
    pool.free(first)
    assert not pool.req_to_token.any()
    pool.alloc([second])
    assert pool.generation[row] > before


def test_c1_clear_restores_everything():
    pool = ReqToTokenPool(2, 4)
    held = reqs(2)
    pool.alloc(held)
    pool.req_to_token[1, 0] = 3
    generation = pool.generation.copy()
    pool.clear()
    assert pool.available_size() == 2
    assert not pool.req_to_token.any()
    assert (pool.generation == generation).all()


def test_freeing_a_request_without_a_row_is_caught():
    pool = ReqToTokenPool(2, 4)
    with pytest.raises(LedgerError, match="outside"):
        pool.free(Req(1))


def test_in_production_a_free_of_the_padding_row_is_counted_and_harms_nothing():
    pool = ReqToTokenPool(2, 4, ledger=Ledger.COUNT)
    pool.free(Req(1))
    assert pool.slots.num_violations == 1
    pool.audit([])


def test_the_audit_knows_who_should_hold_rows_and_watches_the_padding_row():
    pool = ReqToTokenPool(2, 4)
    (row,) = pool.alloc(reqs(1))
    pool.audit([row])
    with pytest.raises(LedgerError):
        pool.audit([])
    pool.req_to_token[PAD, 0] = 1
    with pytest.raises(AssertionError, match="padding row"):
        pool.audit([row])


def test_c2_future_requests_have_rows_of_their_own_while_the_batch_is_full():
    pool = DecodeReqToTokenPool(2, 8, pre_alloc_size=3)
    assert pool.req_to_token.shape == (6, 8)
    running, arriving = reqs(2), reqs(3)
    pool.alloc_running(running, 0)
    pool.alloc(arriving)
    assert pool.available_size() == 0
    pool.free(arriving[0])
    with pytest.raises(OutOfSlots, match="running rows: wanted 1 slots, 0 are free"):
        pool.alloc_running(reqs(1), 2)
