"""The kinds of cache that an engine's layers keep beside full KV."""

from __future__ import annotations

from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.memory.footprint import tracking_slots, window_margin
from forebay.memory.hybrid_rows import HybridReqToTokenPool
from forebay.memory.kinds.kind import Kind
from forebay.memory.kinds.recurrent import States
from forebay.memory.kinds.window import Windows
from forebay.memory.req_to_token_pool import ReqToTokenPool


def make_rows(config: SchedulerConfig) -> ReqToTokenPool:
    """Request rows, which come with state slots where layers keep such."""
    size, context, ps, ledger = config.max_running_requests, config.context_length, config.page_size, config.ledger
    if not config.state.num_slots:
        return ReqToTokenPool(size, context, page_size=ps, ledger=ledger)
    extra_buffer = config.state.strategy is StateStrategy.EXTRA_BUFFER and config.radix_cache
    num_tracking = tracking_slots(extra_buffer, config.overlap_depth)
    return HybridReqToTokenPool(
        size, context, mamba_size=config.state.num_slots, num_tracking=num_tracking, page_size=ps, ledger=ledger
    )


def make_kinds(config: SchedulerConfig, rows: ReqToTokenPool) -> tuple[Kind, ...]:
    """In the order in which they are named where a hit ends for several reasons."""
    kinds: list[Kind] = []
    kept, margin = config.state, 0
    if isinstance(rows, HybridReqToTokenPool):
        kinds.append(States(config, rows))
        margin = kept.track_interval
    if kept.num_window_pages:
        kinds.append(
            Windows(
                kept.num_window_pages,
                config.num_pages,
                rows,
                window=kept.window,
                margin=window_margin(config.page_size, margin),
                ledger=config.ledger,
            )
        )
    return tuple(kinds)
