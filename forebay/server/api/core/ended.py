"""Facts about requests that have ended, by key, for /debug/explain."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Final, NamedTuple

from forebay.requests.updates import CacheReport, History, MemoryReport

MOST_ENDED: Final = 1000  # of each key, each below 1 KB


class Ended(NamedTuple):
    """One request: no text, and no token. `cache`, `memory` and `history` are the engine's reports on its first choice.
    Times are seconds from its arrival, but for `ended_at`, a Unix time. `differs` is why the prompt left a cached one
    of the same session."""

    request_id: str
    route: str
    model: str
    ended_at: float
    total_s: float
    first_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    finish: str
    error: str | None
    differs: str | None
    cache: CacheReport
    memory: MemoryReport
    history: History


EndedByKey = defaultdict[str, deque[Ended]]


def ended_by_key() -> EndedByKey:
    """Return the requests that have ended, by the name of their key; of each key the last `MOST_ENDED`."""
    return defaultdict(partial(deque, maxlen=MOST_ENDED))
