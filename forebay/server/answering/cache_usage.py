"""The effect of the prefix cache on a request, as `usage.cache` says it (C20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from forebay.requests.updates import CacheReport, MemoryReport
from forebay.text.token_bytes import TokenBytes


class CacheUsage(TypedDict):
    """The effect of the prefix cache on the request; `matched_tokens` by kind of cache, `kv` first. After `retractions`
    `recomputed_tokens` were computed again. `checkpoints` are lengths of prompt and answer after which a state is kept:
    the places from which others can go on, of a model with states."""

    cached_tokens: int
    miss_reason: str
    matched_tokens: dict[str, int]
    differs: dict[str, Any] | None
    retractions: int
    recomputed_tokens: int
    checkpoints: list[int]


def cache_usage(
    reports: Sequence[CacheReport], table: TokenBytes, memories: Sequence[MemoryReport] = (MemoryReport(),)
) -> CacheUsage:
    """Sum up the reports of a request's prompts, one each: tokens are summed, the reason and the difference are the
    first's. Of its choices, of which `memories` tell, retractions are summed and the checkpoints are the first's.

    `matched_tokens` are those whose KV was there, and within them the last places from which each other kind of cache
    that layers keep could go on; `cached_tokens` were used. `differs` says where the prompt left a cached
    one of its own session: the position, and the text of the token here and of the one there; null where it left none.
    """
    first = reports[0]
    return {
        "cached_tokens": sum(report.cached_tokens for report in reports),
        "miss_reason": first.miss_reason.value,
        "matched_tokens": {
            "kv": sum(report.kv_tokens for report in reports),
            **{kind: sum(report.resumable.get(kind, 0) for report in reports) for kind in first.resumable},
        },
        "differs": _difference(first, table),
        "retractions": sum(memory.retractions for memory in memories),
        "recomputed_tokens": sum(memory.recomputed_tokens for memory in memories),
        "checkpoints": memories[0].checkpoints,
    }


def _difference(report: CacheReport, table: TokenBytes) -> dict[str, Any] | None:
    if report.differs_at < 0:
        return None
    here, there = (table.spelled(token).decode("utf-8", "replace") for token in (report.token_here, report.token_there))
    return {"position": report.differs_at, "here": here, "there": there}
