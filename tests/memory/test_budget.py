"""Bytes to pages, rows and the slots of other kinds of cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forebay.base.errors import ConfigError
from forebay.config.engine_config import KindOptions, SchedulingOptions, StateStrategy
from forebay.memory.budget import LEAST_CONTEXT, PARTS, BudgetLine, KindDemand, MemoryBudget, MemoryDemand
from forebay.memory.division import divide_memory
from forebay.memory.kinds.build import make_demands
from forebay.memory.kinds.declared import CacheSizes, KindSize, Sizing
from tests.tiers import examples

KIB, MIB = 1 << 10, 1 << 20

PLAIN = MemoryDemand(
    kv_cache_bytes=64 * MIB, kv_bytes_per_token=1024, page_size=16, max_running_requests=64, context_length=4096
)
SCHEDULING = {field.name for field in fields(SchedulingOptions)}
DEMAND = {field.name for field in fields(MemoryDemand)} - {"kinds"}


def test_whole_page_has_the_bytes_of_its_tokens_on_the_device_and_in_host_memory() -> None:
    demand = replace(PLAIN, host_bytes_per_token=512)
    assert (demand.page_bytes, demand.whole_page_bytes) == (16 * 1024, 16 * (1024 + 512))


def with_kinds(demand: MemoryDemand, *, window: int = 256, width: int = 1, **changes: Any) -> MemoryDemand:
    """With other values, and of kinds what `sizes` says, their options and those of the scheduler."""
    demand = replace(demand, width=width, **{name: value for name, value in changes.items() if name in DEMAND})
    wide, state = changes.pop("window_bytes_per_token", 0), changes.pop("state_bytes", 0)
    kept = {"window": KindSize(wide, window), "state": KindSize(state)}
    sizes = CacheSizes(demand.kv_bytes_per_token, {name: size for name, size in kept.items() if size.num_bytes})
    scheduling = SchedulingOptions(**{name: value for name, value in changes.items() if name in SCHEDULING})
    options = KindOptions(**{n: value for n, value in changes.items() if n not in SCHEDULING | DEMAND})
    kinds = make_demands(Sizing(sizes, demand.page_size, options, scheduling, width))
    return replace(demand, kinds=kinds)


HYBRID = partial(with_kinds, PLAIN, state_bytes=64 * KIB)
WINDOWED = partial(with_kinds, PLAIN, window_bytes_per_token=4096, chunked_prefill_size=512)


@dataclass(frozen=True, kw_only=True)
class KeysDemand(KindDemand):
    """A third kind, with a slot for each page."""

    name: ClassVar[str] = "keys"
    unit: ClassVar[str] = "key pages"
    settings: ClassVar[frozenset[str]] = frozenset()
    absent: ClassVar[str] = "no keys"

    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        return num_requests

    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        return [BudgetLine(self.unit, str(budget.num_slots[self.name]), "one for each page")]

    def limits(self, budget: MemoryBudget) -> dict[str, int]:
        return {}

    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        return budget.num_slots[self.name] - num_running


def with_keys(demand: MemoryDemand, key_bytes: int) -> MemoryDemand:
    keys = (KeysDemand(slot_bytes=key_bytes, per_page=PARTS),) if key_bytes else ()
    return replace(demand, kinds=(*demand.kinds, *keys))


demands = st.builds(
    with_keys,
    st.builds(
        with_kinds,
        st.just(PLAIN),
        kv_cache_bytes=st.integers(4096, 1 << 34),
        page_size=st.sampled_from([1, 16, 64]),
        max_running_requests=st.integers(1, 4096),
        context_length=st.integers(1, 1 << 20),
        chunked_prefill_size=st.integers(1, 8192),
        overlap_depth=st.integers(0, 1),
        kv_bytes_per_token=st.sampled_from([0, 1, 1000, 1 << 14]),
        window_bytes_per_token=st.sampled_from([0, 1, 3000, 1 << 16]),
        window=st.integers(1, 8192),
        state_bytes=st.sampled_from([0, 100, 1 << 16, 50 * MIB]),
        radix_cache=st.booleans(),
        strategy=st.sampled_from(StateStrategy),
        max_total_tokens=st.none() | st.integers(1, 1 << 24),
        max_mamba_cache_size=st.none() | st.integers(1, 10_000),
        mamba_full_memory_ratio=st.floats(0.01, 100),
        swa_full_tokens_ratio=st.floats(0.01, 1),
        width=st.sampled_from([1, 2, 4, 8]),
        logits_bytes=st.sampled_from([0, 4000, 1 << 20]),
        inputs_bytes=st.sampled_from([0, 3000]),
        spare_cache=st.booleans(),
        requests_first=st.booleans(),
    ),
    st.sampled_from([0, 0, 100, 1 << 16]),
)


def divided(demand: MemoryDemand) -> MemoryBudget:
    """Nothing is asked of a division that cannot be: then one request does not fit."""
    try:
        return divide_memory(demand)
    except ConfigError:
        assert demand.least_bytes(1) > demand.kv_cache_bytes
        assume(False)
        raise


def reasons(budget: MemoryBudget) -> dict[str, str]:
    return {line.item: line.reason for line in budget.lines}


@given(demands)
def test_the_division_never_exceeds_the_memory_nor_any_limit(demand: MemoryDemand) -> None:
    budget = divided(demand)
    assert budget.total_bytes <= demand.kv_cache_bytes
    assert budget.num_bytes["kv"] == (budget.num_pages + 1) * demand.page_bytes
    assert 1 <= budget.max_running_requests <= demand.max_running_requests
    assert 1 <= budget.context_length <= min(demand.context_length, budget.max_total_tokens)
    if demand.max_total_tokens is not None:
        assert budget.num_pages <= -(-demand.max_total_tokens // demand.page_size)


@given(demands)
def test_what_may_run_at_once_has_what_it_needs(demand: MemoryDemand) -> None:
    """C4: a page, a window, a live state, the tracked ones, and a cached one to come back to; and of any other kind."""
    budget = divided(demand)
    rows = budget.max_running_requests
    assert budget.num_pages >= rows
    assert budget.num_slots.keys() == {"kv", *(kind.name for kind in demand.kinds)}
    divided_up = replace(demand, kv_cache_bytes=demand.kv_cache_bytes - budget.demand.draft_bytes)
    for kind in demand.kinds:
        assert budget.num_slots[kind.name] >= kind.least(divided_up, rows) >= rows


def is_no_worse(budget: MemoryBudget, other: MemoryBudget) -> bool:
    """Whether `budget` has as many requests, or a longer context as far as that comes first, but for the eighth that
    further requests may take of it. Beside states, whose share is of whole slots, either may differ by a few."""
    demand = budget.demand
    if demand.following and len(demand.following) < len(demand.kinds):
        return True
    if not demand.following or not demand.page_bytes:
        return budget.max_running_requests >= other.max_running_requests
    first = LEAST_CONTEXT if demand.requests_first else demand.context_length
    sizes = [(min(one.context_length, first), one.max_running_requests) for one in (budget, other)]
    has_more = budget.max_running_requests > other.max_running_requests
    return sizes[0] >= sizes[1] or (has_more and sizes[0][0] >= sizes[1][0] - sizes[1][0] // 8)


@settings(max_examples=examples(50))
@given(demands)
def test_divide_memory_more_memory_never_serves_less(demand: MemoryDemand) -> None:
    less = divided(demand)
    assert is_no_worse(divide_memory(replace(demand, kv_cache_bytes=2 * demand.kv_cache_bytes)), less)


@settings(max_examples=examples(50))
@given(demands)
def test_divide_memory_larger_slots_never_serve_more(demand: MemoryDemand) -> None:
    kinds = tuple(replace(kind, slot_bytes=2 * kind.slot_bytes) for kind in demand.kinds)
    larger = divided(replace(demand, kinds=kinds))
    assert is_no_worse(divide_memory(demand), larger)


def serves_all(budget: MemoryBudget, demand: MemoryDemand, width: int) -> bool:
    rows = demand.max_running_requests + demand.pre_alloc_size
    pages = rows * -(-demand.context_length // demand.page_size)
    enough = budget.num_pages >= min(pages, demand.most_pages or pages) or not demand.page_bytes
    return enough and budget.num_rows == rows and budget.demand.width == width


@settings(max_examples=examples(50))
@given(demands)
def test_divide_memory_without_spare_cache_takes_the_least_that_serves_all_at_full_context(
    demand: MemoryDemand,
) -> None:
    whole, budget = (divided(replace(demand, spare_cache=spare)) for spare in (True, False))
    num_bytes, width = budget.demand.kv_cache_bytes, whole.demand.width
    if not serves_all(whole, demand, width):
        assert budget == replace(whole, demand=replace(whole.demand, spare_cache=False))
        return
    assert serves_all(budget, demand, width)
    assert num_bytes <= demand.kv_cache_bytes
    less = replace(demand, kv_cache_bytes=num_bytes - max(demand.page_bytes, 1), spare_cache=True)
    assert less.kv_cache_bytes < less.least_bytes(1) or not serves_all(divide_memory(less), demand, width)


def test_divide_memory_without_spare_cache_names_the_requests_that_need_no_more() -> None:
    wanted = replace(PLAIN, kv_cache_bytes=1 << 40, spare_cache=False)
    budget = divide_memory(wanted)
    assert budget.num_pages == pytest.approx(64 * 4096 // 16, abs=2)
    assert budget.max_total_tokens >= 64 * 4096
    assert reasons(budget)["KV pages"] == "64 requests of 4096 tokens need no more"
    assert divide_memory(replace(wanted, spare_cache=True)).num_pages > 1_000_000


def test_limits_are_clamped_with_a_reason_instead_of_refusing() -> None:
    budget = divide_memory(replace(PLAIN, kv_cache_bytes=6 * 16 * KIB, max_running_requests=100))
    assert budget.num_pages < 6
    assert budget.context_length == budget.num_pages * 16
    assert "lowered from 100" in reasons(budget)["request rows"]
    assert "lowered from 4096" in reasons(budget)["context length"]


def test_what_was_asked_is_given_when_it_fits() -> None:
    budget = divide_memory(replace(PLAIN, max_total_tokens=1000))
    assert (budget.num_pages, budget.max_running_requests, budget.context_length) == (63, 63, 1008)
    assert divide_memory(replace(PLAIN, max_total_tokens=10_000)).context_length == 4096
    assert budget.total_bytes == budget.num_bytes["kv"] + budget.row_bytes


def test_not_a_single_page_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"have 31.0 KiB and one request needs at least 32.\d KiB"):
        divide_memory(replace(PLAIN, kv_cache_bytes=31 * KIB, context_length=16))


def test_states_and_kv_share_the_memory_by_the_ratio() -> None:
    budget = divide_memory(HYBRID(mamba_full_memory_ratio=0.5))
    assert budget.num_bytes["state"] == pytest.approx(64 * MIB / 3, rel=0.02)
    assert budget.num_bytes["kv"] == pytest.approx(64 * MIB * 2 / 3, rel=0.02)
    assert "--mamba-full-memory-ratio" in reasons(budget)["state slots"]


def test_no_more_slots_are_set_aside_than_can_be_of_use() -> None:
    """Without a prefix cache only the running requests'; with one, as many as the KV could be resumed at."""
    assert divide_memory(HYBRID(radix_cache=False)).num_slots["state"] == 64
    small = divide_memory(HYBRID(state_bytes=64, mamba_full_memory_ratio=10))
    assert small.num_slots["state"] <= 64 * 3 + small.num_pages + 64
    assert "could not be of use" in reasons(small)["state slots"]


@pytest.mark.parametrize(
    ("changes", "per_request"),
    [
        ({"strategy": StateStrategy.NO_BUFFER}, 2),
        ({}, 3),
        ({"overlap_depth": 1}, 4),
        ({"overlap_depth": 1, "radix_cache": False}, 1),
    ],
)
def test_fewer_requests_run_when_their_states_do_not_fit(changes: dict[str, Any], per_request: int) -> None:
    """C4: counted with the tracking slots, before the memory is divided."""
    budget = divide_memory(HYBRID(state_bytes=MIB, **changes))
    assert [kind.least(budget.demand, 1) for kind in budget.demand.kinds] == [per_request]
    assert budget.max_running_requests == min(64, budget.num_slots["state"] // per_request)
    assert f"{per_request} for each request" in reasons(budget)["request rows"]


def test_one_request_runs_even_where_its_states_are_more_than_their_share() -> None:
    budget = divide_memory(HYBRID(state_bytes=15 * MIB, mamba_full_memory_ratio=0.01))
    assert (budget.max_running_requests, budget.num_slots["state"]) == (1, 3)


def test_a_configured_size_that_is_too_small_is_raised_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """C4."""
    with caplog.at_level(logging.WARNING, logger="forebay"):
        budget = divide_memory(HYBRID(max_mamba_cache_size=10))
    assert budget.num_slots["state"] == 64 * 3
    assert [("10" in text, "64 reqs x 3 slots/req = 192" in text) for text in caplog.messages] == [(True, True)]
    assert "raised" in reasons(budget)["state slots"]


def test_a_configured_size_is_kept_where_it_is_enough_and_lowered_where_it_does_not_fit() -> None:
    assert divide_memory(HYBRID(max_mamba_cache_size=200)).num_slots["state"] == 200
    lowered = divide_memory(HYBRID(max_mamba_cache_size=10_000))
    assert 800 < lowered.num_slots["state"] < 1024
    assert lowered.context_length == PLAIN.context_length, "KV is left for as many tokens as the states could serve"
    assert "lowered" in reasons(lowered)["state slots"]


def test_windows_hold_their_share_of_the_tokens() -> None:
    budget = divide_memory(WINDOWED(max_running_requests=4, swa_full_tokens_ratio=0.5))
    assert budget.num_slots["window"] == budget.num_pages // 2
    assert budget.total_bytes == pytest.approx(64 * MIB, rel=0.01)


def test_windows_of_all_requests_come_before_the_ratio() -> None:
    budget = divide_memory(WINDOWED(max_running_requests=20, swa_full_tokens_ratio=0.1))
    assert (
        budget.num_slots["window"] == 20 * 19 + 32
    )  # 255 tokens, a page behind and one begun at either end; one step's chunks
    assert "what 20 requests need" in reasons(budget)["window pages"]


# A window of 1,024 tokens, 4 MiB of it, and 16 MiB of KV of a full context: a request with both takes 20 MiB.
LONG = partial(
    with_kinds, PLAIN, window=1024, window_bytes_per_token=4096, context_length=16384, chunked_prefill_size=16
)


def test_divide_memory_full_context_of_one_request_comes_before_further_windows() -> None:
    for kv_cache_bytes, least_rows, most_rows in ((23 * MIB, 1, 1), (36 * MIB, 3, 5), (512 * MIB, 64, 64)):
        budget = divide_memory(LONG(kv_cache_bytes=kv_cache_bytes))
        assert budget.context_length == 16384
        assert least_rows <= budget.max_running_requests <= most_rows
    lowered = divide_memory(LONG(kv_cache_bytes=36 * MIB))
    assert reasons(lowered)["request rows"].startswith("lowered from 64: one request's context comes first; each ")
    assert "what one request's context leaves" in reasons(divide_memory(LONG(kv_cache_bytes=23 * MIB)))["window pages"]


def test_divide_memory_context_of_one_request_comes_before_the_ratio_of_windows() -> None:
    wide = divide_memory(LONG(kv_cache_bytes=64 * MIB, max_running_requests=1, swa_full_tokens_ratio=1.0))
    assert (wide.context_length, wide.num_slots["window"] * 16 * 4096 > 40 * MIB) == (16384, True)


@pytest.mark.parametrize("num_mib", [8, 12, 16])
def test_divide_memory_without_a_full_context_others_shorten_it_by_an_eighth_at_most(num_mib: int) -> None:
    alone, many = (
        divide_memory(LONG(kv_cache_bytes=num_mib * MIB, max_running_requests=num, window=64)) for num in (1, 64)
    )
    assert alone.context_length < 16384
    assert many.context_length >= alone.context_length * 7 // 8
    assert many.max_running_requests > 1


def test_divide_memory_window_pages_have_kv_for_as_many_tokens() -> None:
    """A window never fills without KV for its tokens."""
    budget = divide_memory(LONG(kv_cache_bytes=200 * MIB, context_length=2048, kv_bytes_per_token=4096))
    assert 20 <= budget.max_running_requests < 64
    assert budget.max_total_tokens >= budget.max_running_requests * 1024


def test_divide_memory_written_number_of_requests_comes_before_all_but_a_short_context() -> None:
    memory = {"kv_cache_bytes": 36 * MIB, "max_running_requests": 6}
    written = divide_memory(LONG(**memory, requests_first=True))
    assert (written.max_running_requests, 2048 < written.context_length < 12288) == (6, True)
    assert divide_memory(LONG(**memory)).context_length == 16384
    many = divide_memory(LONG(kv_cache_bytes=36 * MIB, max_running_requests=64, requests_first=True))
    assert many.context_length >= 2048
    assert "more than a short context comes first" in reasons(many)["request rows"]


def test_divide_memory_drafts_are_those_of_requests_that_can_run() -> None:
    """C4: with drafts for 64 rows, one request would lose a third of its context."""
    drafts = {"width": 8, "logits_bytes": 16 * KIB, "spare_cache": False}
    one, many = (divide_memory(LONG(kv_cache_bytes=24 * MIB, max_running_requests=num, **drafts)) for num in (1, 64))
    assert many.context_length == one.context_length == 16384
    assert many.demand.draft_bytes <= 8 * 16 * KIB * many.max_running_requests


def test_a_window_longer_than_the_context_is_as_long_as_the_context() -> None:
    demand = WINDOWED(window=1 << 20)
    assert [kind.num_read(divide_memory(demand).demand) for kind in demand.kinds] == [4096]


def test_a_model_without_attention_has_pages_for_what_its_rows_and_states_can_use() -> None:
    budget = divide_memory(HYBRID(kv_bytes_per_token=0))
    assert budget.num_bytes["kv"] == 0
    assert budget.num_slots["state"] == pytest.approx(1024, abs=16)
    assert budget.num_pages == (64 + budget.num_slots["state"]) * 256
    assert budget.context_length == 4096


def test_a_model_with_windows_only_gives_them_all_the_memory() -> None:
    budget = divide_memory(WINDOWED(kv_bytes_per_token=0))
    assert budget.num_bytes["window"] == pytest.approx(64 * MIB, rel=0.01)
