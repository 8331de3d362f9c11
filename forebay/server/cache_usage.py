"""What the prefix cache did for a request, as `usage.cache` says it (C20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.requests.updates import CacheReport
from forebay.text.token_bytes import TokenBytes


def cache_usage(reports: Sequence[CacheReport], table: TokenBytes) -> dict[str, Any]:
    """Of a request's prompts, one report each: tokens are summed, the reason and the difference are the first's.

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
    }


def _difference(report: CacheReport, table: TokenBytes) -> dict[str, Any] | None:
    if report.differs_at < 0:
        return None
    here, there = (table.spelled(token).decode("utf-8", "replace") for token in (report.token_here, report.token_there))
    return {"position": report.differs_at, "here": here, "there": there}
