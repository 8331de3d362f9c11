"""From a configuration and what a model's layers keep to the division of memory and the scheduler's limits. No torch:
`forebay plan` asks the same questions without an engine."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Final

from forebay.config.engine_config import EngineConfig, SchedulerConfig, StateConfig, StateStrategy
from forebay.memory.budget import MemoryBudget, MemoryDemand
from forebay.pools.cache_spec import CacheSizes

# A token is computed in the time in which this part of the weights' bytes is copied to the host and back. For the
# embedded model (269 MB, 512-token prompts, two cores) that was 480 us and, at 6.3 GB/s each way, 1.5 MB.
RECOMPUTE_SHARE: Final = 1 / 180


def memory_demand(config: EngineConfig, sizes: CacheSizes, max_position_embeddings: int) -> MemoryDemand:
    memory, scheduling, states = config.memory, config.scheduling, config.states
    return MemoryDemand(
        **asdict(replace(memory, context_length=min(memory.context_length, max_position_embeddings))),
        **sizes._asdict(),
        chunked_prefill_size=scheduling.chunked_prefill_size,
        overlap_depth=scheduling.overlap_depth,
        radix_cache=scheduling.radix_cache,
        track_interval=states.track_interval,
        extra_buffer=states.strategy is StateStrategy.EXTRA_BUFFER,
    )


def scheduler_config(
    config: EngineConfig, budget: MemoryBudget, sizes: CacheSizes, weight_bytes: int
) -> SchedulerConfig:
    return SchedulerConfig(
        **asdict(config.scheduling),
        page_size=budget.page_size,
        num_pages=budget.num_pages,
        max_running_requests=budget.max_running_requests,
        context_length=budget.context_length,
        state=StateConfig(
            **asdict(config.states),
            num_slots=budget.num_state_slots,
            num_window_pages=budget.num_window_pages,
            window=budget.window,
            page_bytes=budget.page_size * sizes.kv_bytes_per_token,
            window_page_bytes=budget.page_size * sizes.window_bytes_per_token,
            slot_bytes=sizes.state_bytes,
            recompute_bytes_per_token=int(weight_bytes * RECOMPUTE_SHARE),
        ),
    )
