"""The sums of a division as they are shown, term by term, and the bounds of memory at their values (C4)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.base.errors import NotEnoughMemory
from forebay.memory.budget import LEAST_CONTEXT, PARTS, MemoryBudget, MemoryDemand
from forebay.memory.division import divide_memory
from tests.memory.test_budget import HYBRID, KIB, LONG, MIB, PLAIN, WINDOWED, reasons, with_keys


def shown(budget: MemoryBudget) -> list[str]:
    return [f"{line.item}: {line.value}: {line.reason}" for line in budget.lines]


def test_lines_of_states_and_draft_tokens_are_the_terms_of_the_sum() -> None:
    drafts = {"width": 4, "logits_bytes": 4000, "inputs_bytes": 3000, "draft_row_bytes": 500}
    budget = divide_memory(HYBRID(**drafts))
    assert shown(budget) == [
        "KV pages: 2095 x 16 tokens = 33520 tokens: 32.7 MiB hold that many",
        "KV cache: 32.8 MiB: (2095 + 1 padding) pages, 1.0 KiB per token",
        "state slots: 470: 0.9 times the memory of KV (--mamba-full-memory-ratio)",
        "slots per request: 3: 1 live + 1 tracking + 1 cached",
        "states: 29.4 MiB: (470 + 1 padding) slots of 64.0 KiB",
        "request rows: 64: --max-running-requests",
        "page table: 69.1 KiB: (64 + 1 padding) rows, 4096 tokens each",
        "context length: 4096 tokens: the KV cache holds a request that long",
        "tokens verified per request: 4: the certain one, and guesses",
        "verify logits: 1000.0 KiB: 64 requests, 4 tokens each, 3.9 KiB per token",
        "verify inputs: 750.0 KiB: 64 requests, 4 tokens each, 2.9 KiB per token",
        "draft states: 31.7 KiB: (64 + 1 padding) rows of 500 B",
    ]
    assert budget.total_bytes == 2096 * 16 * KIB + 471 * 64 * KIB + 65 * (4 * 256 + 64) + 64 * 4 * 7000 + 65 * 500


def test_lines_of_windows_say_which_pages_and_rows_the_requests_need() -> None:
    budget = divide_memory(WINDOWED(width=4, logits_bytes=4000))
    assert shown(budget) == [
        "KV pages: 721 x 16 tokens = 11536 tokens: 11.3 MiB beside the 832 window pages that requests need",
        "KV cache: 11.3 MiB: (721 + 1 padding) pages, 1.0 KiB per token",
        "window pages: 832 x 16 tokens = 13312 tokens: what 40 requests need; at least 832",
        "window cache: 52.1 MiB: (832 + 1) pages, 4.0 KiB per token, 256 tokens of window",
        "request rows: 40: lowered from 64: one request's context comes first; "
        "each running request needs a page of its own, 20 window pages",
        "page table: 43.6 KiB: (40 + 1 padding) rows, 4096 tokens each",
        "context length: 4096 tokens: the KV cache holds a request that long",
        "tokens verified per request: 4: the certain one, and guesses",
        "verify logits: 625.0 KiB: 40 requests, 4 tokens each, 3.9 KiB per token",
    ]


def test_lines_of_limits_that_were_lowered_say_from_what_and_why() -> None:
    budget = divide_memory(WINDOWED(width=8, logits_bytes=MIB, kv_cache_bytes=16 * MIB, max_total_tokens=2000))
    assert shown(budget) == [
        "KV pages: 125 x 16 tokens = 2000 tokens: --max-total-tokens 2000",
        "KV cache: 2.0 MiB: (125 + 1 padding) pages, 1.0 KiB per token",
        "window pages: 212 x 16 tokens = 3392 tokens: what 9 requests need; at least 212",
        "window cache: 13.3 MiB: (212 + 1) pages, 4.0 KiB per token, 256 tokens of window",
        "request rows: 9: lowered from 64: one request's context comes first; "
        "each running request needs a page of its own, 20 window pages",
        "page table: 5.5 KiB: (9 + 1 padding) rows, 2000 tokens each",
        "context length: 2000 tokens: lowered from 4096: a request cannot be longer than the KV cache",
        "tokens verified per request: 1: lowered from 8: logits of 9 requests, 1.0 MiB for a token, have 2.0 MiB of "
        "16.0 MiB at most: lower --max-running-requests or raise --kv-cache-bytes",
    ]


def test_row_has_4_bytes_a_page_of_context_its_columns_and_its_hot_buffer() -> None:
    assert PLAIN.row_bytes(3, 4096) == 4 * (4 * 256 + 64)
    assert PLAIN.row_bytes(0, 4097) == 4 * 257 + 64
    assert replace(PLAIN, hot_row_bytes=1000).row_bytes(1, 16) == 2 * (4 + 64 + 1000)


def test_draft_bytes_are_those_of_all_tokens_that_requests_verify_and_of_all_rows() -> None:
    demand = replace(PLAIN, logits_bytes=100, inputs_bytes=10, draft_row_bytes=7)
    assert demand.draft_bytes == 0
    assert replace(demand, width=2).draft_bytes == 64 * 2 * 110 + 65 * 7


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 4096),
        ({"max_total_tokens": 100}, 100),
        ({"kv_cache_bytes": 5 * 16 * KIB}, 80),
        ({"kv_cache_bytes": 5 * 16 * KIB + 16 * KIB - 1}, 80),
        ({"kv_cache_bytes": 1}, 16),  # a page at least
        ({"kv_cache_bytes": 1, "kv_bytes_per_token": 0}, 4096),
    ],
)
def test_possible_context_is_cut_to_the_limit_and_to_whole_pages_of_the_memory(
    changes: dict[str, int], tokens: int
) -> None:
    assert replace(PLAIN, **changes).possible_context == tokens


def test_pages_at_least_are_those_of_the_hot_buffer_or_one() -> None:
    assert PLAIN.pages_at_least == 1
    assert [replace(PLAIN, hot_tokens=tokens).pages_at_least for tokens in (16, 17, 1 << 20)] == [1, 2, 256]


def test_least_bytes_are_a_page_and_all_other_slots_of_each_request_and_the_padding() -> None:
    rows = PLAIN.row_bytes(2, 4096)
    assert PLAIN.least_bytes(2) == rows + 3 * 16 * KIB
    keyed = with_keys(PLAIN, 100)
    assert keyed.least_bytes(2) == rows + 3 * 16 * KIB + 3 * 100
    assert keyed.least_bytes(2, {"keys": 9}) == rows + 3 * 16 * KIB + 10 * 100
    assert keyed.least_bytes(2, {"keys": 0}) == rows + 3 * 16 * KIB


def test_full_pages_are_those_of_the_context_or_of_all_tokens() -> None:
    assert PLAIN.full_pages == 256
    assert replace(PLAIN, max_total_tokens=33).full_pages == 3
    assert replace(PLAIN, max_total_tokens=1 << 20).full_pages == 256


def test_ratios_have_three_places_and_a_short_context_2048_tokens() -> None:
    assert (PARTS, LEAST_CONTEXT) == (1000, 2048)


def test_memory_demand_has_nothing_but_full_kv_and_a_prefix_cache_unless_it_is_said() -> None:
    demand = MemoryDemand(kv_cache_bytes=1, kv_bytes_per_token=1, page_size=1, max_running_requests=1, context_length=1)
    others = (demand.hot_tokens, demand.hot_row_bytes, demand.host_bytes_per_token, demand.pre_alloc_size)
    drafts = (demand.logits_bytes, demand.inputs_bytes, demand.draft_row_bytes)
    assert (others, drafts, demand.width, demand.radix_cache, demand.kinds) == ((0,) * 4, (0,) * 3, 1, True, ())


def test_refusal_names_each_part_that_one_request_needs() -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        divide_memory(WINDOWED(kv_cache_bytes=100 * KIB, state_bytes=64 * KIB, hot_tokens=16, hot_row_bytes=5000))
    assert str(refused.value) == (
        "the caches have 100.0 KiB and one request needs at least 3.2 MiB: two pages (one is padding) of 16 tokens at "
        "1.0 KiB, 45 window pages (and a padding one) of 64.0 KiB, 3 state slots (and a padding one) of 64.0 KiB, "
        "a hot buffer of 4.9 KiB: raise --kv-cache-bytes or --mem-fraction-static, or lower --page-size"
    )


def test_rows_of_a_hot_buffer_say_what_each_needs() -> None:
    budget = divide_memory(replace(PLAIN, hot_tokens=64, hot_row_bytes=4 * MIB, pre_alloc_size=2))
    assert reasons(budget)["request rows"].startswith("lowered from 66: one request's context comes first; ")
    assert reasons(budget)["request rows"].endswith(
        "each running request needs 4 pages of its own, a hot buffer of 4.0 MiB"
    )
    assert budget.num_rows == budget.max_running_requests
    plenty = divide_memory(replace(PLAIN, pre_alloc_size=2))
    assert (plenty.max_running_requests, plenty.pre_alloc_size, plenty.num_rows) == (64, 2, 66)
    assert reasons(plenty)["request rows"] == "--max-running-requests and the extra slots of decode"


@pytest.mark.parametrize(("tokens", "rows", "why"), [(160, 10, "lowered from 64: each running"), (1024, 64, "--max")])
def test_rows_are_at_most_the_pages_that_were_asked_for(tokens: int, rows: int, why: str) -> None:
    budget = divide_memory(replace(PLAIN, max_total_tokens=tokens))
    assert budget.num_rows == rows
    assert reasons(budget)["request rows"].startswith(why)


@pytest.mark.parametrize("share", [8])
def test_drafts_take_an_eighth_of_the_memory_at_most(share: int) -> None:
    """With rows that cost as good as nothing, their number is what is asked."""
    fits = MIB * share
    demand = replace(PLAIN, kv_cache_bytes=fits, width=2, logits_bytes=8 * KIB)
    assert replace(demand, width=2).draft_bytes == fits // share
    assert divide_memory(demand).demand.width == 2
    assert divide_memory(replace(demand, kv_cache_bytes=fits - share)).demand.width == 1


def test_model_that_keeps_no_kv_has_a_mebi_of_pages_at_most() -> None:
    budget = divide_memory(HYBRID(kv_bytes_per_token=0, context_length=1 << 14, kv_cache_bytes=1 << 31))
    assert budget.num_pages == 1 << 20
    assert "no layer keeps KV of all tokens" in reasons(budget)["KV pages"]


def test_others_shorten_a_context_that_is_not_full_by_an_eighth() -> None:
    alone = divide_memory(LONG(kv_cache_bytes=8 * MIB, max_running_requests=1, window=16))
    many = divide_memory(LONG(kv_cache_bytes=8 * MIB, max_running_requests=2000, window=16))
    assert alone.context_length < 16384
    least = alone.num_pages - alone.num_pages // 8
    assert least <= many.num_pages < least + 3 * 4 + 1  # a row more takes 3 window pages, each as large as 4 KV pages
    assert 1 < many.max_running_requests < 2000


def test_slot_bytes_are_those_of_a_page_a_row_and_each_kind() -> None:
    budget = divide_memory(replace(WINDOWED(state_bytes=64 * KIB), host_bytes_per_token=10))
    assert budget.slot_bytes == {
        "kv": 16 * (KIB + 10), "rows": 4 * 256 + 64, "window": 16 * 4096, "state": 64 * KIB,
    }  # fmt: skip
    assert budget.max_total_tokens == budget.num_pages * 16
