"""Measured rates: how long a byte takes from each tier of the prefix cache, and a token of a prompt to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_LEAST_BYTES: Final = 64 << 10  # of a copy that is measured: smaller ones take the time of a step
_LEAST_TOKENS: Final = 16  # of a prompt that is measured
_NEW: Final = 0.25  # share of the newest measurement
_FORGIVES: Final = 0.95  # each copy that was not made lets its tier count as so much faster: rates change


class LoadRates:
    """Says what a copy from a tier is worth. `bytes_per_token` are copied in the time of a token until both rates were
    measured."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._byte_s: dict[str, float] = {}
        self._token_s: float | None = None

    def loaded(self, num_bytes: Mapping[str, int], seconds: float) -> None:
        """Record that a step did nothing but copy bytes, by tier; of several tiers none is measured."""
        ((tier, count),) = num_bytes.items() if len(num_bytes) == 1 else (("", 0),)
        if count >= _LEAST_BYTES:
            self._byte_s[tier] = _mixed(self._byte_s.get(tier), seconds / count)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record that a step computed tokens of prompts, and nothing else."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = _mixed(self._token_s, seconds / num_tokens)

    def worth(self, tier: str) -> int:
        """Return the bytes that are copied from a tier in the time in which one token is computed, at least 1."""
        byte_s = self._byte_s.get(tier)
        if not byte_s or not self._token_s:
            return self._bytes_per_token
        return max(1, int(self._token_s / byte_s))

    def refused(self, tier: str) -> None:
        """Record that a copy from a tier was not made because computing is faster."""
        if tier in self._byte_s:
            self._byte_s[tier] *= _FORGIVES


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + _NEW * (now - before)
