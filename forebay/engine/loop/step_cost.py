"""The fixed cost of a step, in tokens of prompts: what tenants are charged beside the tokens of a step (C32).

A step of n tokens takes about F + n x C seconds. F is mostly the time to read the weights, and C the time to compute a
token of a prompt. So a step that decodes for a few requests takes as long as many tokens of a prompt: of a model of
259 M weights on one core, 8 decodes take as long as 40 tokens. Were only tokens charged, a tenant whose requests decode
would get several times its share of the machine's time.

C is the median of steps of the length at which that is lowest. F / C is the median of steps that only decoded.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

RECENT: Final = 32  # steps of one length whose median counts
RECENT_DECODES: Final = 128  # steps that only decoded: they are shorter
FEW: Final = 3  # steps of a length: not enough to take their seconds per token


class StepCost:
    """Measures `tokens`, F / C of this model on this machine: 0 until both kinds of step were measured, `most` at most.
    Steps with as many bits in their length have the same length here."""

    def __init__(self, most: float) -> None:
        self.tokens = 0.0
        self._most = most
        self._token_s: float | None = None  # C
        self._by_length: dict[int, deque[float]] = {}  # seconds per token of steps with prompts
        self._fixed: deque[float] = deque(maxlen=RECENT_DECODES)  # tokens, of steps that only decoded

    def ended(self, num_tokens: int, seconds: float, *, with_prompts: bool) -> None:
        """Record that a step of `num_tokens` tokens took `seconds`."""
        if with_prompts:
            self._by_length.setdefault(num_tokens.bit_length(), deque(maxlen=RECENT)).append(seconds / num_tokens)
            known = [median(own) for own in self._by_length.values() if len(own) > FEW]
            self._token_s = min(known, default=None)
        elif self._token_s:
            self._fixed.append(min(self._most, max(0.0, seconds / self._token_s - num_tokens)))
            self.tokens = median(self._fixed)
