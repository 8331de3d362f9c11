"""What the engine counts, and the forms it is reported in.

Counters (all only grow; `State.counters` carries them under these names, the scheduler's own ones beside them):

    requests_total            taken in or refused           requests_refused_total    ended at the door
    requests_stop_total, requests_length_total, requests_abort_total, requests_error_total      ends by reason
    steps_total               committed                     steps_failed_total        cost their requests an error
    prefill_tokens_total      prompt tokens computed        generated_tokens_total    tokens sent to clients
    host_seconds_total        in plan and commit            busy_seconds_total        between a step's end and the last
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.base.log import event
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import FinishReason, Update

if TYPE_CHECKING:
    from forebay.engine.core import EngineCore

_FINISHED: Final = {reason: f"requests_{reason.value}_total" for reason in FinishReason}


class Stats:
    """Counters of one engine. `host_s` is added to by the core, which has the clock."""

    def __init__(self, now: float) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "requests_total",
                "requests_refused_total",
                *_FINISHED.values(),
                "steps_total",
                "steps_failed_total",
                "prefill_tokens_total",
                "generated_tokens_total",
            ),
            0.0,
        )
        self.host_s = 0.0
        self.last_step_at = now
        self._line_at = now
        self._line_counters = dict(self.counters)

    def add(self, name: str, n: float = 1.0) -> None:
        self.counters[name] += n

    def count_step(self, plan: StepPlan, now: float) -> None:
        self.counters["steps_total"] += 1
        self.counters["prefill_tokens_total"] += plan.num_tokens - plan.num_decodes
        self.last_step_at = now

    def count_updates(self, updates: list[Update]) -> list[Update]:
        """Count and pass through."""
        counters = self.counters
        for update in updates:
            counters["generated_tokens_total"] += len(update.token_ids)
            if update.finish is not None:
                counters[_FINISHED[update.finish]] += 1
        return updates
