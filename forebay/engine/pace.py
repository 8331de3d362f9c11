"""How long a step may take before it counts as a hang."""

from __future__ import annotations

from typing import Final

STEP_LIMIT_S: Final = 10.0  # of steps that are expected to be shorter


class Pace:
    """Learned from the steps that ended, so that a long prompt on a slow machine is not taken for a hang: a step may
    take as long for each of its tokens as the slowest one has. Until one has ended, and at most, it may take `most_s`.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._s_per_token: float | None = None

    def ended(self, num_tokens: int, seconds: float) -> None:
        self._s_per_token = max(self._s_per_token or 0.0, seconds / max(1, num_tokens))

    def limit_s(self, num_tokens: int) -> float:
        """`num_tokens` 0: of the time in which nothing could be planned, which no step tells anything about."""
        if self._s_per_token is None or num_tokens == 0:
            return self._most_s
        return min(self._most_s, max(STEP_LIMIT_S, num_tokens * self._s_per_token))
