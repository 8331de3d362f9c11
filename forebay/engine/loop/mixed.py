"""How many prompt tokens a step may have in which others decode, by the time that it would take. Without a clock.

A step of d decodes and n prompt tokens is predicted to take D(d) + n x C seconds. D is the median of steps that only
decoded, by their number of requests. C is the median of the seconds that a prompt token added to recent mixed steps, by
the context in front of it. What a mixed step costs whatever its length is in C, at the lengths that are in use. So both
are of this model, its kernels and this machine, and what other work takes away meanwhile is in them.

The limit of a step is `max_step_s`, or `MEDIAN_STEPS` times D of all requests that run or wait. It is not D of those
that decode now: under a load of long prompts fewer and fewer would decode, the limit would shrink with them, and
prompts would be computed in the least chunks, which are the slowest.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from forebay.scheduler.scheduler import NO_LIMIT

MEDIAN_STEPS: Final = 2.0  # that a step takes at most
RECENT: Final = 32  # steps whose median counts
LEAST_TOKENS: Final = 16  # of a chunk, so that prompts go on: as many as the kernels compute at once
_CONTEXT_TOKENS: Final = 1024  # up to which context is one class, and behind which each doubling is


class Recent:
    """Medians of the last `RECENT` values, by a number that they depend on."""

    def __init__(self) -> None:
        self._values: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def add(self, key: int, value: float) -> None:
        """Take in a measured value."""
        values = self._values.setdefault(key, deque(maxlen=RECENT))
        values.append(value)
        self._medians[key] = median(values)

    def nearest(self, key: int) -> tuple[int, float] | None:
        """Return the measured key that is nearest to `key`, with its median; None if nothing was measured."""
        if key in self._medians:
            return key, self._medians[key]
        near = min(self._medians, key=lambda other: abs(other - key), default=None)
        return None if near is None else (near, self._medians[near])


class MixedChunks:
    """Which chunk the next mixed step may have. `max_step_s` None: `MEDIAN_STEPS` of the median decode step."""

    def __init__(self, max_step_s: float | None, page_size: int) -> None:
        self._max_step_s = max_step_s
        self._least = max(LEAST_TOKENS, page_size)
        self._decodes = Recent()  # seconds of a step, by its number of requests
        self._tokens = Recent()  # seconds of a prompt token, by class of context

    def limit(self, num_decodes: int, num_requests: int, context: int) -> int:
        """Return the most prompt tokens of the next step. `num_decodes` requests decode in it, `num_requests` could
        once all prompts are computed, and the longest prompt under way has `context` tokens computed. `NO_LIMIT`
        until both kinds of step were measured."""
        token = self._tokens.nearest(_context_class(context))
        decode_s = self._decode_s(num_decodes)
        if token is None or decode_s is None:
            return NO_LIMIT
        max_step_s = self._max_step_s
        if max_step_s is None:
            max_step_s = MEDIAN_STEPS * (self._decode_s(max(num_decodes, num_requests)) or decode_s)
        return max(self._least, int(min((max_step_s - decode_s) / token[1], NO_LIMIT)))

    def decoded(self, num_decodes: int, seconds: float) -> None:
        """A step that only decoded has taken `seconds`."""
        self._decodes.add(_requests_class(num_decodes), seconds)

    def mixed(self, num_decodes: int, num_tokens: int, context: int, seconds: float) -> None:
        """A step of decodes and `num_tokens` prompt tokens has taken `seconds`."""
        decode_s = self._decode_s(num_decodes)
        if decode_s is not None and seconds > 0:  # with a step in flight two may end at one tick of the clock
            # Noise may make the step look shorter than one without the prompt: no token is free.
            added_s = max(seconds - decode_s, seconds * num_tokens / (num_tokens + num_decodes) / 4)
            self._tokens.add(_context_class(context), added_s / num_tokens)

    def _decode_s(self, num_decodes: int) -> float | None:
        """Return D for this number of decodes. If it was not measured, return the nearest one's, adjusted by a prompt
        token's time for each row."""
        key = _requests_class(num_decodes)
        found = self._decodes.nearest(key)
        if found is None:
            return None
        near, seconds = found
        token = self._tokens.nearest(0)
        return seconds if token is None else max(seconds / 2, seconds + (key - near) * token[1])


def _requests_class(num_requests: int) -> int:
    """The number itself below 8, then a few for each doubling."""
    shift = max(0, num_requests.bit_length() - 3)
    return num_requests >> shift << shift


def _context_class(context: int) -> int:
    return (context // _CONTEXT_TOKENS).bit_length()
