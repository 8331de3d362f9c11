"""KV pages and the locations of tokens in them (C5)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.holding import footprint
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.req_to_token_pool import ReqToTokenPool


def test_c5_the_padding_page_is_never_handed_out():
    kv = PagedKvAllocator(8, 16)
    assert (kv.num_pages, kv.page_size) == (8, 16)
    assert 0 not in kv.take_ids(8, 1)


@given(page_size=st.sampled_from([1, 3, 16, 64]), start=st.integers(0, 200), length=st.integers(0, 100))
def test_the_location_of_a_token_is_its_page_and_its_offset_in_it(page_size, start, length):
    stop = start + length
    rows = ReqToTokenPool(3, 300, page_size=page_size)
    rows.req_to_token[:] = np.random.default_rng(0).permutation(rows.req_to_token.size).reshape(4, -1)
    which = np.arange(length) % 4
    expected = [
        int(rows.req_to_token[row, p // page_size]) * page_size + p % page_size
        for row, p in zip(which.tolist(), range(start, stop), strict=True)
    ]
    assert rows.locations(which, np.arange(start, stop)).tolist() == expected


@pytest.mark.parametrize(
    ("kv_len", "held", "pages"), [(0, 0, 0), (1, 0, 1), (16, 0, 1), (17, 0, 2), (17, 2, 0), (5, 3, 0)]
)
def test_a_footprint_is_what_is_missing(kv_len, held, pages):
    assert footprint(kv_len, 16, held) == pages
