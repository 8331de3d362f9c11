"""The work that an engine does for one tenant: the holder of an API key, or of several keys of one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How long a tenant whose turn it is starts nothing before others give up places for it: whichever is over first. Most
# rows come free within so many short steps; steps with prompts of 2,048 tokens bound no time.
PATIENCE: Final = 32  # steps
PATIENCE_S: Final = 0.3


@dataclass(slots=True, eq=False)
class Account:
    """`service` orders tenants that wait for the same places: the one with the least is served next. It is the work for
    the tenant in tokens of prompts, divided by its weight, and is raised when the tenant joins others
    (`scheduler/queues.py`). The other numbers only grow, but for `num_requests`."""

    name: str
    weight: int = 1
    service: float = 0.0
    num_requests: int = 0  # that have not ended
    waits_since: int = 0  # the step after which it had a waiting request and started none
    waits_since_s: float = 0.0  # the time of that
    computed_tokens: int = 0  # of prompts; without those from the prefix cache, and none of them twice
    encoded_tokens: float = 0.0  # the work on pictures of prompts, in tokens of prompts
    generated_tokens: int = 0
    step_tokens: float = 0.0  # its parts of what steps cost whatever their length, in tokens of prompts
    num_started: int = 0
    queued_s: float = 0.0  # of all those that started, from arrival to start

    def is_patient(self, step: int, now: float) -> bool:
        """Return whether the tenant, which starts nothing, still waits for places to come free."""
        return step - self.waits_since < PATIENCE and now - self.waits_since_s < PATIENCE_S
