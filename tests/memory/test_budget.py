"""Bytes to pages and rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.errors import ConfigError
from forebay.memory.budget import divide_memory

MIB = 1 << 20


def divide(**changes):
    asked = {
        "cache_bytes": 64 * MIB,
        "kv_bytes_per_token": 1024,
        "page_size": 16,
        "max_total_tokens": 10**9,
        "max_running_requests": 64,
        "context_length": 4096,
    }
    return divide_memory(**{**asked, **changes})


@given(
    cache_bytes=st.integers(4096, 1 << 32),
    kv_bytes_per_token=st.integers(1, 1 << 14),
    page_size=st.sampled_from([1, 16, 64]),
    max_total_tokens=st.integers(1, 1 << 24),
    max_running_requests=st.integers(1, 4096),
    context_length=st.integers(1, 1 << 20),
)
def test_the_division_never_exceeds_the_memory_nor_any_limit(**asked):
    page_bytes = asked["page_size"] * asked["kv_bytes_per_token"]
    try:
        budget = divide_memory(**asked)
    except ConfigError:
        assert asked["cache_bytes"] < 2 * page_bytes
        return
    assert budget.kv_bytes == (budget.num_pages + 1) * page_bytes <= asked["cache_bytes"]
    assert 1 <= budget.num_pages <= -(-asked["max_total_tokens"] // asked["page_size"])
    assert 1 <= budget.max_running_requests <= min(asked["max_running_requests"], budget.num_pages)
    assert 1 <= budget.context_length <= min(asked["context_length"], budget.max_total_tokens)


def test_limits_are_clamped_with_a_reason_instead_of_refusing():
    budget = divide(cache_bytes=6 * 16 * 1024, max_running_requests=100, context_length=4096)
    assert budget.num_pages < 6
    assert budget.context_length == budget.num_pages * 16
    reasons = {line.item: line.reason for line in budget.lines}
    assert "lowered from 100" in reasons["request rows"]
    assert "lowered from 4096" in reasons["context length"]


def test_what_was_asked_is_given_when_it_fits():
    budget = divide(max_total_tokens=1000)
    assert (budget.num_pages, budget.max_running_requests, budget.context_length) == (63, 63, 1008)
    assert divide(max_total_tokens=10_000).context_length == 4096
    assert budget.total_bytes == budget.kv_bytes + budget.row_bytes


def test_not_a_single_page_is_an_error_with_the_numbers():
    with pytest.raises(ConfigError, match=r"has 31.0 KiB and needs at least 32.0 KiB"):
        divide(cache_bytes=31 * 1024)
