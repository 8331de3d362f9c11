"""Two engines' halves of transfers: what arrives, and how it ends."""

from __future__ import annotations

import pytest

from tests.disagg.pair import BACKENDS, EVERYTHING, pair, transfer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_sizes", [(1, 1), (16, 16), (4, 16), (16, 4)], ids=str)
def test_what_arrives_is_what_was_sent(backend: str, page_sizes: tuple[int, int]) -> None:
    """C21"""
    with pair(EVERYTHING, page_sizes=page_sizes, backend=backend) as (prefill, decode):
        transfer(prefill, decode, 45, in_pages=1)
        transfer(prefill, decode, 33, start=16, in_pages=0, seed=5)
