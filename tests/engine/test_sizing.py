"""From a configuration to the division of memory, to the scheduler's limits, and to who fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import NotEnoughMemory
from forebay.cli.plan import capacity
from forebay.config.engine_config import (
    CacheTypes,
    HisparseOptions,
    SpeculationOptions,
    SpeculativeAlgorithm,
    StateStrategy,
)
from forebay.engine.lifecycle.sizing import memory_demand, scheduler_config, within_memory
from forebay.memory.budget import MemoryBudget, MemoryDemand
from forebay.memory.division import divide_memory
from forebay.pools.cache_spec import (
    FullAttention,
    IndexKeys,
    LatentAttention,
    RecurrentState,
    SlidingWindow,
    cache_sizes,
)
from tests.engine.engine_fakes import changed

SPECS = (
    FullAttention(num_kv_heads=2, head_dim=16),
    RecurrentState(conv=(32, 3), ssm=(4, 8, 16), inputs=50),
    SlidingWindow(num_kv_heads=1, head_dim=16, window=20),
)
LARGE = changed(kv_cache_bytes=1 << 22, max_total_tokens=None)


def demand_of(**changes: object) -> MemoryDemand:
    config = changed(LARGE, **changes)
    return memory_demand(config, cache_sizes(SPECS, config.types), model())


def model(**fields: Any) -> SimpleNamespace:
    sizes = {"max_position_embeddings": 4096, "vocab_size": 1000, "hidden_size": 64, "draft_size": 64, "vision": None}
    return SimpleNamespace(**sizes | fields)


@pytest.mark.parametrize(("ssm_dtype", "state_bytes"), [("float32", 96 * 4 + 512 * 4), ("bfloat16", 96 * 4 + 512 * 2)])
def test_scans_states_have_a_type_of_their_own(ssm_dtype: str, state_bytes: int) -> None:
    assert cache_sizes(SPECS, CacheTypes(mamba_ssm_dtype=ssm_dtype)).num_bytes("state") == state_bytes


def test_8_bit_kv_takes_a_byte_per_entry_and_a_scale_per_head() -> None:
    specs = [FullAttention(num_kv_heads=3, head_dim=64), LatentAttention(rank=32, rope_dim=8)]
    assert cache_sizes(specs, CacheTypes()).kv_bytes_per_token == 4 * (2 * 3 * 64 + 40)
    assert cache_sizes(specs, CacheTypes(kv_cache_dtype="int8")).kv_bytes_per_token == 2 * 3 * (64 + 4) + 40 + 4


def test_the_model_ends_the_context_and_the_scheduler_gets_what_was_divided() -> None:
    sizes = cache_sizes(SPECS, LARGE.types)
    budget = divide_memory(memory_demand(LARGE, sizes, model(max_position_embeddings=100)))
    limits = scheduler_config(LARGE, budget, weight_bytes=1 << 20)
    assert limits.context_length == 100
    assert (limits.num_pages, limits.max_running_requests) == (budget.num_pages, budget.max_running_requests)
    kinds, num_slots = limits.kinds, budget.num_slots
    assert kinds.num_slots == {"state": num_slots["state"], "window": num_slots["window"]}
    assert kinds.num_read == {"window": 20}
    page_bytes = 4 * 2 * 16 * 4
    assert kinds.slot_bytes == {"kv": 2 * page_bytes, "window": page_bytes, "state": sizes.num_bytes("state")}
    assert 0 < kinds.recompute_bytes_per_token < 1 << 20


@pytest.mark.parametrize("strategy", list(StateStrategy))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("context", [8, 100, 256])
def test_what_is_said_to_fit_fits_in_every_pool(strategy: StateStrategy, depth: int, context: int) -> None:
    budget = divide_memory(demand_of(strategy=strategy, overlap_depth=depth))
    fits = capacity(budget, context)
    windows, states = budget.demand.kinds
    pages = -(-context // budget.page_size)
    assert 1 <= fits.num_requests <= budget.max_running_requests
    assert (fits.num_requests + fits.num_cached_beside) * pages <= budget.num_pages
    live = fits.num_requests * (states.least(budget.demand, 1) - 1)
    assert live + fits.num_cached_beside <= budget.num_slots["state"]
    assert windows.least(budget.demand, fits.num_requests) <= budget.num_slots["window"]
    assert fits.num_cached_beside <= fits.num_cached_idle <= budget.num_slots["state"]


@pytest.mark.parametrize(("num_requests", "width"), [(2, 8), (15, 8), (16, 7), (60, 2), (61, 1), (1 << 12, 1)])
def test_steps_are_as_wide_as_the_logits_of_their_tokens_have_room(num_requests: int, width: int) -> None:
    """An eighth of 4 MiB; each token's take 4,000 bytes, what is kept of it 200, and a head's state of a row 272."""
    asked = SpeculationOptions(algorithm=SpeculativeAlgorithm.NEXTN, num_draft_tokens=8)
    plain = divide_memory(demand_of(max_running_requests=num_requests))
    budget = divide_memory(demand_of(max_running_requests=num_requests, speculation=asked))
    assert within_memory(asked, budget).num_draft_tokens == width
    guesses = num_requests * width * 4200 + (num_requests + 1) * (64 * 4 + 16) if width > 1 else 0
    assert budget.demand.draft_bytes == guesses <= (1 << 22) // 8
    assert budget.total_bytes <= 1 << 22
    assert width == 1 or budget.num_pages < plain.num_pages
    told = {line.item: line for line in budget.lines}
    assert told["tokens verified per request"].value == str(width)
    assert told["tokens verified per request"].reason.startswith("lowered from 8: logits") is (width < 8)
    assert ("verify logits" in told) is ("verify inputs" in told) is (width > 1)
    assert "tokens verified per request" not in {line.item for line in plain.lines}


def test_rows_of_a_draft_head_with_several_streams_hold_all_of_them() -> None:
    """A head beside the model is fed with hidden states, whatever the model has inside."""
    sizes, streamed = cache_sizes(SPECS, LARGE.types), model(draft_size=4 * 64)
    for algorithm, numbers in ((SpeculativeAlgorithm.NEXTN, 4 * 64), (SpeculativeAlgorithm.EAGLE, 64)):
        asked = SpeculationOptions(algorithm=algorithm, num_draft_tokens=2)
        demand = memory_demand(replace(LARGE, speculation=asked), sizes, streamed)
        assert demand.draft_row_bytes == 4 * numbers + 16


def test_without_a_prefix_cache_no_conversation_stays() -> None:
    assert capacity(divide_memory(demand_of(radix_cache=False)), 100)[2:] == (0, 0)


SPARSE = (IndexKeys(head_dim=16), LatentAttention(rank=48, rope_dim=16, sparse=True))


def sparse_budget(*, kv_cache_bytes: int = 1 << 22, **options: object) -> MemoryBudget:
    hisparse = HisparseOptions(**{"device_buffer_size": 64, "top_k": 32, **options})  # type: ignore[arg-type]
    config = replace(changed(LARGE, kv_cache_bytes=kv_cache_bytes), hisparse=hisparse)
    types = replace(config.types, sparse_kv_on_host=hisparse.enabled)
    config = replace(config, types=types, scheduling=replace(config.scheduling, chunked_prefill_size=64))
    return divide_memory(memory_demand(config, cache_sizes(SPARSE, types), model()))


def test_hisparse_memory_is_divided_among_tiers_and_hot_buffers() -> None:
    """Bytes of a token: 64 of its index key, 256 of its KV."""
    budget = sparse_budget(host_to_device_ratio=4.0)
    page, rows = budget.page_size, budget.num_rows
    assert budget.num_bytes["kv"] == (budget.num_pages + 1) * page * (64 + 256)
    assert budget.num_slots["resident"] == budget.num_pages // 4
    assert budget.num_bytes["resident"] == (budget.num_slots["resident"] + 1) * page * 256
    hot = (64 + page) * 256 + 64 * 8 + page * 4
    assert budget.row_bytes - sparse_budget(device_buffer_size=0).row_bytes == (rows + 1) * hot
    assert budget.total_bytes <= 1 << 22
    lines = {line.item: (line.value, line.reason) for line in budget.lines}
    assert "one for 4 KV pages" in lines["resident pages"][1]
    assert "64 tokens each" in lines["hot buffers"][1]
    assert "host memory, part of the KV cache" in lines["host tier"][1]


def test_kv_in_a_file_leaves_memory_for_more_pages() -> None:
    """At ratio 4 a token takes 64 bytes and a quarter of 256 beside the file, 320 without HiSparse."""
    dense, in_memory = sparse_budget(device_buffer_size=0), sparse_budget(host_to_device_ratio=4.0)
    in_file = sparse_budget(host_to_device_ratio=4.0, host_path="/somewhere")
    assert in_memory.num_pages < dense.num_pages
    assert in_file.num_pages > 2 * dense.num_pages
    assert in_file.total_bytes <= 1 << 22
    lines = {line.item: line.reason for line in in_file.lines}
    assert "a file, or a GPU's host memory, beside this memory" in lines["host tier"]
    assert in_file.slot_bytes["kv"] == dense.slot_bytes["kv"] == in_file.page_size * (64 + 256), "of a host copy"


def test_hot_buffers_leave_room_for_the_kv_that_they_are_for() -> None:
    """Of 192 KiB each of 8 requests has its share, or fewer run."""
    budget = sparse_budget(kv_cache_bytes=192 << 10)
    assert 1 <= budget.num_rows < 8
    assert budget.num_pages * budget.page_size >= 64 * budget.num_rows
    reason = next(line.reason for line in budget.lines if line.item == "request rows")
    assert "16 pages of its own, a hot buffer of" in reason
    with pytest.raises(NotEnoughMemory, match="a hot buffer of"):
        sparse_budget(kv_cache_bytes=20 << 10)
