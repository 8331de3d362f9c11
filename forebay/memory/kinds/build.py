"""The kinds of cache that an engine's layers keep beside full KV: what they ask of memory, and their rooms."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from forebay.base.units import human_bytes
from forebay.config.engine_config import KindOptions, SchedulerConfig, SchedulingOptions, StateStrategy
from forebay.memory.budget import PARTS, KindDemand
from forebay.memory.kinds.hybrid_rows import (
    HybridMambaDecodeReqToTokenPool,
    HybridReqToTokenPool,
    StateDemand,
    effective_mamba_size,
    tracking_slots,
)
from forebay.memory.kinds.kind import Kind
from forebay.memory.kinds.recurrent import States
from forebay.memory.kinds.window import WindowDemand, Windows, window_margin
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool

DEMANDS: Final[tuple[type[KindDemand], ...]] = (WindowDemand, StateDemand)
COUNTERS: Final = (*Windows.COUNTERS, *States.COUNTERS)


class CacheSizes(NamedTuple):
    """Bytes over all layers, for one token of full and of windowed KV, and for one state slot. `window` 0: no layer has
    one; otherwise the widest, since the window pages of a token are kept or given back for all layers together.
    `inputs_bytes_per_token` are what recurrent layers keep of a token until it is certain that it stays."""

    kv_bytes_per_token: int
    window_bytes_per_token: int = 0
    state_bytes: int = 0
    window: int = 0
    inputs_bytes_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.kv_bytes_per_token + self.window_bytes_per_token

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a request that do not depend on its length."""
        return self.state_bytes

    def of_a_request(self) -> list[str]:
        """Describe the memory of a request that does not grow with its length, in words."""
        found = []
        if self.window:
            size = human_bytes(self.window_bytes_per_token * self.window)
            found.append(f"window {size} a request, once it has {self.window:,} tokens")
        if self.state_bytes:
            found.append(f"state {human_bytes(self.state_bytes)} a request, however long, with scans in float32")
        return found


def make_demands(
    sizes: CacheSizes,
    page_size: int,
    options: KindOptions,
    scheduling: SchedulingOptions,
    width: int,
    num_certain: int = 0,
) -> tuple[KindDemand, ...]:
    """Make the demands of the kinds that layers keep, for steps of up to `width` tokens of a decode. Without a prefix
    cache nothing is tracked. `num_certain` requests, of a decode server, have slots whatever was configured."""
    demands: list[KindDemand] = []
    depth, tracks = scheduling.overlap_depth, options.strategy is StateStrategy.EXTRA_BUFFER and scheduling.radix_cache
    if sizes.window_bytes_per_token:
        demands.append(
            WindowDemand(
                slot_bytes=page_size * sizes.window_bytes_per_token,
                per_page=round(options.swa_full_tokens_ratio * PARTS),
                ratio=options.swa_full_tokens_ratio,
                window=sizes.window,
                track_interval=options.track_interval if sizes.state_bytes else 0,
                overlap_depth=depth,
                width=width,
                chunked_prefill_size=scheduling.chunked_prefill_size,
            )
        )
    if sizes.state_bytes:
        num_tracking, configured = tracking_slots(tracks, depth), options.max_mamba_cache_size
        certain = num_certain if configured is not None else 0
        demands.append(
            StateDemand(
                slot_bytes=sizes.state_bytes,
                num_tracking=num_tracking,
                cached=scheduling.radix_cache,
                configured=configured,
                raised=effective_mamba_size(configured or 0, certain, num_tracking) if certain else 0,
                ratio=options.mamba_full_memory_ratio,
            )
        )
    return tuple(demands)


def make_rows(config: SchedulerConfig) -> ReqToTokenPool:
    """Request rows, which come with state slots where layers keep such."""
    size, context = config.max_running_requests, config.context_length
    options: dict[str, Any] = {"page_size": config.page_size, "ledger": config.ledger}
    if config.disaggregation.is_decode:
        options["pre_alloc_size"] = config.disaggregation.decode_extra_slots
    if not config.kinds.num_slots:
        pool = DecodeReqToTokenPool if config.disaggregation.is_decode else ReqToTokenPool
        return pool(size, context, **options)
    tracks = config.kinds.strategy is StateStrategy.EXTRA_BUFFER and config.radix_cache
    options |= {"mamba_size": config.kinds.num_slots, "num_tracking": tracking_slots(tracks, config.overlap_depth)}
    hybrid = HybridMambaDecodeReqToTokenPool if config.disaggregation.is_decode else HybridReqToTokenPool
    rows = hybrid(size, context, **options)
    num_slots = rows.mamba_pool.size
    assert num_slots == config.kinds.num_slots, f"{num_slots} state slots, memory was divided for {config.kinds}"
    return rows


def make_kinds(config: SchedulerConfig, rows: ReqToTokenPool) -> tuple[Kind, ...]:
    """In the order in which they are named where a hit ends for several reasons."""
    kinds: list[Kind] = []
    options, margin = config.kinds, 0
    if isinstance(rows, HybridReqToTokenPool):
        kinds.append(States(config, rows))
        margin = options.track_interval
    if options.num_window_pages:
        kinds.append(
            Windows(
                options.num_window_pages,
                config.num_pages,
                rows,
                window=options.window,
                margin=window_margin(config.page_size, margin),
                ledger=config.ledger,
            )
        )
    return tuple(kinds)
