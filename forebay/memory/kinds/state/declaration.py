"""The declaration of recurrent states as a kind of cache."""

from __future__ import annotations

from typing import Any, Final

from forebay.base.units import human_bytes
from forebay.config.engine_config import SchedulerConfig, SchedulingOptions, StateStrategy
from forebay.memory.kinds.declared import DeclaredKind, KindSize, Sizing
from forebay.memory.kinds.state.hybrid_rows import (
    STATE,
    HybridMambaDecodeReqToTokenPool,
    HybridReqToTokenPool,
    StateDemand,
    effective_mamba_size,
    tracking_slots,
)
from forebay.memory.kinds.state.recurrent import States
from forebay.memory.kinds.state.work import StateWork
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool


def make_rows(config: SchedulerConfig) -> ReqToTokenPool:
    """Make the request rows, which come with state slots where layers keep such."""
    size, context = config.max_running_requests, config.context_length
    options: dict[str, Any] = {"page_size": config.page_size, "ledger": config.ledger}
    if config.disaggregation.is_decode:
        options["pre_alloc_size"] = config.disaggregation.decode_extra_slots
    num_slots = config.kinds.num_slots_of(STATE)
    if not num_slots:
        pool = DecodeReqToTokenPool if config.disaggregation.is_decode else ReqToTokenPool
        return pool(size, context, **options)
    options |= {"mamba_size": num_slots, "num_tracking": _num_tracking(config.kinds.strategy, config)}
    hybrid = HybridMambaDecodeReqToTokenPool if config.disaggregation.is_decode else HybridReqToTokenPool
    rows = hybrid(size, context, **options)
    found = rows.mamba_pool.size
    assert found == num_slots, f"{found} state slots, memory was divided for {config.kinds}"
    return rows


def _num_tracking(strategy: StateStrategy, scheduling: SchedulingOptions) -> int:
    """Without a prefix cache nothing is tracked."""
    return tracking_slots(strategy is StateStrategy.EXTRA_BUFFER and scheduling.radix_cache, scheduling.overlap_depth)


def _demand(size: KindSize, sizing: Sizing) -> StateDemand:
    options, configured = sizing.options, sizing.options.max_mamba_cache_size
    num_tracking = _num_tracking(options.strategy, sizing.scheduling)
    certain = sizing.num_certain if configured is not None else 0
    return StateDemand(
        slot_bytes=size.num_bytes,
        num_tracking=num_tracking,
        cached=sizing.scheduling.radix_cache,
        configured=configured,
        raised=effective_mamba_size(configured or 0, certain, num_tracking) if certain else 0,
        ratio=options.mamba_full_memory_ratio,
    )


def _make(config: SchedulerConfig, rows: ReqToTokenPool) -> States | None:
    return States(config, rows) if isinstance(rows, HybridReqToTokenPool) else None


def _of_a_request(size: KindSize) -> str:
    return f"state {human_bytes(size.num_bytes)} a request, however long, with scans in float32"


RECURRENT_STATES: Final = DeclaredKind(
    kind=States,
    work=StateWork,
    demand_type=StateDemand,
    demand=_demand,
    make=_make,
    of_a_request=_of_a_request,
)
