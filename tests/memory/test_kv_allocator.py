"""KV pages and the locations of tokens in them (C5)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.footprint import final_kv_len, footprint
from forebay.memory.kv_allocator import PagedKvAllocator, decode_locations, extend_locations


def test_c5_the_padding_page_is_never_handed_out():
    kv = PagedKvAllocator(8, 16)
    assert (kv.num_pages, kv.page_size) == (8, 16)
    assert 0 not in kv.take_ids(8, 1)


@given(page_size=st.sampled_from([1, 3, 16, 64]), start=st.integers(0, 200), length=st.integers(0, 100))
def test_extend_and_decode_locations_agree_with_the_definition(page_size, start, length):
    stop = start + length
    pages = np.random.default_rng(0).permutation(400)[: -(-max(stop, 1) // page_size)].astype(np.int32) + 1
    expected = [int(pages[p // page_size]) * page_size + p % page_size for p in range(start, stop)]
    assert extend_locations(pages, start, stop, page_size).tolist() == expected
    positions = np.arange(start, stop)
    rows = np.ones(length, dtype=np.int64)
    table = np.stack([np.zeros_like(pages), pages])
    assert decode_locations(table, rows, positions, page_size).tolist() == expected


@pytest.mark.parametrize(
    ("kv_len", "held", "pages"), [(0, 0, 0), (1, 0, 1), (16, 0, 1), (17, 0, 2), (17, 2, 0), (5, 3, 0)]
)
def test_a_footprint_is_what_is_missing(kv_len, held, pages):
    assert footprint(kv_len, 16, held_pages=held).pages == pages
    assert footprint(kv_len, 16).rows == 1
    assert footprint(kv_len, 16, has_row=True).rows == 0


def test_the_last_sampled_token_needs_no_kv():
    assert final_kv_len(10, 1) == 10
    assert final_kv_len(10, 5) == 14
