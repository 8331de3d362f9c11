"""How long the parts of one answer took, as the server measured them."""

from __future__ import annotations

import time
from typing import NamedTuple

from forebay.server.answering.generation import Generation


class Timings(NamedTuple):
    """Seconds. `prompt_s` lasts from the request's arrival to its first token and contains its wait, `decode_s` from
    there to its last token."""

    total_s: float
    prompt_s: float
    decode_s: float

    @classmethod
    def of(cls, generation: Generation) -> Timings:
        now, begin = time.monotonic(), generation.started_at
        first = now if generation.first_token_at is None else generation.first_token_at
        last = first if generation.last_token_at is None else generation.last_token_at
        return cls(now - begin, first - begin, last - first)
