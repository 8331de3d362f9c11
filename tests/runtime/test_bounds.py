"""A-2: an index outside its pool, -1 above all, raises before it becomes an address."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.requests.step_plan import StepPlan
from forebay.runtime.bounds import IndexOutOfPool, PoolBounds

BOUNDS = PoolBounds(num_rows=3, num_pages=5, pages_per_row=2, page_size=4, vocab_size=97)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


PLAN = StepPlan(
    step=1,
    num_extends=1,
    rows=ids(1, 2),
    q_lens=ids(2, 1),
    seq_lens=ids(2, 8),
    out_cache_loc=ids(4, 5, 19),
    input_ids=ids(0, 96),
    sample_mask=np.array([True, True]),
    write_rows=ids(2),
    write_columns=ids(1),
    write_pages=ids(4),
)
LARGEST = {
    "rows": 2,
    "out_cache_loc": 19,
    "seq_lens": 8,
    "input_ids": 96,
    "write_rows": 2,
    "write_columns": 1,
    "write_pages": 4,
}


def test_a_plan_inside_its_pools_passes_and_so_does_one_without_row_writes():
    BOUNDS.check(PLAN)
    BOUNDS.check(replace(PLAN, input_ids=ids(), write_rows=ids(), write_columns=ids(), write_pages=ids()))


@pytest.mark.parametrize("field", LARGEST)
@pytest.mark.parametrize("beyond", [-1, 1, 2**31, -(2**31)])
def test_every_index_of_a_plan_is_checked_at_both_ends(field, beyond):
    values = getattr(PLAN, field).copy()
    values[-1] = beyond if beyond < 0 else LARGEST[field] + beyond
    with pytest.raises(IndexOutOfPool, match=field):
        BOUNDS.check(replace(PLAN, **{field: values}))
