"""From a configuration and what a model's layers keep to the division of memory and the scheduler's limits. No torch:
`forebay plan` asks the same questions without an engine."""

from __future__ import annotations

from typing import Final, NamedTuple

from forebay.base.units import ceil_div
from forebay.config.engine_config import EngineConfig, SchedulerConfig, StateConfig, StateStrategy
from forebay.memory.budget import MemoryBudget, MemoryDemand
from forebay.pools.cache_spec import CacheSizes

# A token is computed in the time in which this part of the weights' bytes is copied to the host and back. For the
# embedded model (269 MB, 512-token prompts, two cores) that was 480 us and, at 6.3 GB/s each way, 1.5 MB.
RECOMPUTE_SHARE: Final = 1 / 180


def memory_demand(config: EngineConfig, sizes: CacheSizes, max_position_embeddings: int) -> MemoryDemand:
    return MemoryDemand(
        cache_bytes=config.kv_cache_bytes,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        context_length=min(config.context_length, max_position_embeddings),
        chunked_prefill_size=config.chunked_prefill_size,
        overlap_depth=config.overlap_depth,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        window_bytes_per_token=sizes.window_bytes_per_token,
        window=sizes.window,
        track_interval=config.mamba_track_interval,
        state_bytes=sizes.state_bytes,
        radix_cache=config.radix_cache,
        extra_buffer=config.mamba_scheduler_strategy is StateStrategy.EXTRA_BUFFER,
        max_total_tokens=config.max_total_tokens,
        max_mamba_cache_size=config.max_mamba_cache_size,
        mamba_full_memory_ratio=config.mamba_full_memory_ratio,
        swa_full_tokens_ratio=config.swa_full_tokens_ratio,
    )


def scheduler_config(
    config: EngineConfig, budget: MemoryBudget, sizes: CacheSizes, weight_bytes: int
) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=budget.page_size,
        num_pages=budget.num_pages,
        max_running_requests=budget.max_running_requests,
        context_length=budget.context_length,
        chunked_prefill_size=config.chunked_prefill_size,
        mixed_chunk_size=config.mixed_chunk_size,
        schedule_policy=config.schedule_policy,
        schedule_conservativeness=config.schedule_conservativeness,
        radix_cache=config.radix_cache,
        radix_eviction_policy=config.radix_eviction_policy,
        overlap_depth=config.overlap_depth,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        queue_timeout_s=config.queue_timeout_s,
        request_timeout_s=config.request_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        ledger=config.ledger,
        state=StateConfig(
            num_slots=budget.num_state_slots,
            strategy=config.mamba_scheduler_strategy,
            track_interval=config.mamba_track_interval,
            checkpoint_interval=config.checkpoint_interval,
            num_window_pages=budget.num_window_pages,
            window=budget.window,
            page_bytes=budget.page_size * sizes.kv_bytes_per_token,
            window_page_bytes=budget.page_size * sizes.window_bytes_per_token,
            slot_bytes=sizes.state_bytes,
            retraction_host_bytes=config.retraction_host_bytes,
            recompute_bytes_per_token=int(weight_bytes * RECOMPUTE_SHARE),
        ),
    )


class Capacity(NamedTuple):
    """How many requests of one length, prompt and output together, may run at once; and how many conversations of that
    length the prefix cache holds beside them, and when nothing runs."""

    context: int
    num_requests: int
    num_cached_beside: int
    num_cached_idle: int


def capacity(demand: MemoryDemand, budget: MemoryBudget, context: int) -> Capacity:
    pages = ceil_div(context, budget.page_size)
    num_requests = min(budget.max_running_requests, budget.num_pages // pages)

    def cached_beside(num_running: int) -> int:
        """A cached conversation has all its pages, and one state and one window at its end."""
        if not demand.radix_cache:
            return 0
        room = [(budget.num_pages - num_running * pages) // pages]
        if budget.num_state_slots:
            room.append(budget.num_state_slots - num_running * (1 + demand.num_tracking))
        if budget.num_window_pages:
            kept = ceil_div(min(context, budget.window), budget.page_size)
            used = demand.window_pages(num_running) if num_running else 0
            room.append((budget.num_window_pages - used) // kept)
        return max(0, min(room))

    return Capacity(context, num_requests, cached_beside(num_requests), cached_beside(0))
