"""The declaration of sliding windows as a kind of cache."""

from __future__ import annotations

from typing import Final

from forebay.base.units import human_bytes
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.budget import PARTS
from forebay.memory.kinds.declared import DeclaredKind, KindSize, Sizing
from forebay.memory.kinds.kind import Reserve
from forebay.memory.kinds.state.hybrid_rows import STATE
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kinds.window.demand import WindowDemand, window_margin, window_reserve
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.kinds.window.work import WindowWork
from forebay.memory.req_to_token_pool import ReqToTokenPool


def _demand(size: KindSize, sizing: Sizing) -> WindowDemand:
    options, scheduling = sizing.options, sizing.scheduling
    return WindowDemand(
        slot_bytes=sizing.page_size * size.num_bytes + size.page_bytes,
        per_page=round(options.swa_full_tokens_ratio * PARTS),
        ratio=options.swa_full_tokens_ratio,
        window=size.num_read,
        track_interval=options.track_interval if STATE in sizing.sizes.kinds else 0,
        overlap_depth=scheduling.overlap_depth,
        width=sizing.width,
        most_prompt_tokens=scheduling.chunked_prefill_size,
    )


def _make(config: SchedulerConfig, rows: ReqToTokenPool) -> Windows | None:
    kinds = config.kinds
    num_pages = kinds.num_slots_of(WINDOW)
    if not num_pages:
        return None
    track_interval = kinds.track_interval if kinds.num_slots_of(STATE) else 0
    return Windows(
        num_pages,
        config.num_pages,
        rows,
        window=kinds.num_read[WINDOW],
        margin=window_margin(config.page_size, track_interval),
        reserve=_reserve(config, track_interval),
        ledger=config.ledger,
    )


def _reserve(config: SchedulerConfig, track_interval: int) -> Reserve:
    """Return what `WindowDemand.least` counts, for the limits that were settled."""
    return window_reserve(
        min(config.kinds.num_read[WINDOW], config.context_length),
        config.page_size,
        config.overlap_depth,
        track_interval,
        width=config.speculation.num_draft_tokens,
        most_prompt_tokens=max(
            config.chunked_prefill_size, 0 if config.pictures is None else config.pictures.longest_span
        ),
    )


def _of_a_request(size: KindSize) -> str:
    return f"window {human_bytes(size.num_bytes * size.num_read)} a request, once it has {size.num_read:,} tokens"


SLIDING_WINDOWS: Final = DeclaredKind(
    kind=Windows,
    work=WindowWork,
    demand_type=WindowDemand,
    demand=_demand,
    make=_make,
    of_a_request=_of_a_request,
)
