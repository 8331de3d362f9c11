"""Memory is divided into at least the slots that admission promises, for every model type that has windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.config.engine_config import KindConfig, SchedulerConfig
from forebay.config.resolve import resolve
from forebay.engine.lifecycle.sizing import memory_demand, scheduler_config, within_memory
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.division import divide_memory
from forebay.memory.kinds.build import make_kinds
from forebay.memory.kinds.kind import Reserve
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kinds.window.demand import window_reserve
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.models import needs_of
from forebay.pools.cache_spec import cache_sizes
from tests.models.tiny import CASES, page_size_of, shared_tiny
from tests.pictures import picture_config

SHAPES: dict[str, dict[str, Any]] = {
    "chunks shorter than a page": {"chunked_prefill_size": 2, "overlap_depth": 1},
    "no overlap, drafts": {"chunked_prefill_size": 17, "overlap_depth": 0, "speculative_algorithm": "ngram"},
    "a short context": {"chunked_prefill_size": 64, "overlap_depth": 1, "context_length": 8},
}
SPAN = 23


WINDOWED = [case for case, (_, fields) in CASES.items() if "window" in f"{case} {fields}" and "gguf" not in case]
PAIRS = [(case, shape) for number, case in enumerate(WINDOWED) for shape in (list(SHAPES)[number % len(SHAPES)],)]


@pytest.mark.parametrize(("case", "shape"), PAIRS)
def test_c8_memory_has_what_admission_promises(case: str, shape: str) -> None:
    path, page_size = str(shared_tiny(case).path), page_size_of(case, 4)
    flags = {"context_length": 64, "dtype": "float32", "max_running_requests": 8, "page_size": page_size}
    config = resolve({"model": path, "kv_cache_bytes": "4MiB", **flags, **SHAPES[shape]}).engine
    model = open_checkpoint(path).config
    demand = memory_demand(config, cache_sizes(needs_of(model).cache_specs, config.types), model)
    if not demand.kinds:
        pytest.skip("no kind of cache besides full KV")
    for num_requests in (1, 3, 8):
        least = replace(demand, kv_cache_bytes=demand.least_bytes(num_requests) + demand.draft_bytes)
        budget = divide_memory(least)
        settled = replace(config, speculation=within_memory(config.speculation, budget))
        limits = scheduler_config(settled, budget, weight_bytes=1)
        rows = ReqToTokenPool(budget.num_rows, budget.context_length, page_size=page_size)
        for kind in make_kinds(limits, rows):
            reserve: Reserve = kind.reserve
            promised = reserve.in_flight + budget.num_rows * reserve.per_row
            assert kind.slots.capacity >= promised, (kind.name, num_requests)
            counted = next(each for each in budget.demand.kinds if each.name == kind.name)
            # A step that memory made narrower, or a context that it made shorter, needs less than was counted.
            as_asked = (budget.context_length, budget.demand.width) == (demand.possible_context, demand.width)
            if kind.name == WINDOW and as_asked:
                assert counted.least(budget.demand, budget.num_rows) == promised


def test_c8_runs_of_image_tokens_longer_than_a_chunk_count_as_one_step() -> None:
    """As Gemma 3 has them: such a run is never cut."""
    each = {"page_size": 4, "depth": 1, "track_interval": 0, "width": 1}
    short, long = (window_reserve(8, most_prompt_tokens=most, **each) for most in (5, SPAN))
    assert long.in_flight == 3 * 6 > short.in_flight
    kinds = KindConfig(num_slots={WINDOW: 64}, num_read={WINDOW: 8})
    pictures = picture_config(longest_span=SPAN)
    limits = SchedulerConfig(
        num_pages=64, page_size=4, context_length=64, max_running_requests=4, chunked_prefill_size=5, overlap_depth=1,
        kinds=kinds, pictures=pictures,
    )  # fmt: skip
    (windows,) = make_kinds(limits, ReqToTokenPool(4, 64, page_size=4))
    assert windows.reserve == long
