"""All counters of an engine, each declared once: its name, and its description in /metrics.

To add one, declare it here, or with the kind of cache that counts it (`Kind.COUNTERS`), and increment it where the
event happens. A name that is not declared raises KeyError there. `State.counters`, /debug/state and /metrics follow
from the declaration.
"""

from __future__ import annotations

from typing import Final

from forebay.base.counters import Counter
from forebay.memory.kinds.build import COUNTERS as OF_KINDS
from forebay.memory.miss_reason import MissReason
from forebay.memory.pictures import COUNTERS as OF_PICTURES
from forebay.memory.radix_node import MOVERS
from forebay.requests.updates import FinishReason

OF_REQUESTS: Final = (
    Counter("requests"),
    Counter("prompt_tokens"),
    Counter("cached_tokens"),
    Counter("recomputed_tokens", "Tokens computed once more after their choice was retracted"),
    Counter("computed_prompt_tokens", "Tokens that went through the model as part of a prompt"),
    Counter("generated_tokens", "Tokens sampled so far, those of running choices included"),
    Counter("draft_tokens", "Draft tokens verified"),
    Counter("accepted_tokens", "Draft tokens accepted"),
    Counter("partly_accepted_drafts", "Drafts of which a token was accepted and a later one rejected"),
    Counter("prefixes_kept", "Requests of which a prefix was kept for as long as their client asked"),
    Counter("prefixes_not_kept", "Requests that asked for that in vain"),
    Counter("retractions", "Times that a running choice gave its pages up and waited again"),
    Counter("retractions_kept", "Retractions whose KV and state were kept on the host"),
    Counter("displaced", "Times that a running choice gave its pages up to another tenant"),
    Counter("steps"),
    Counter("replayed_steps", "Steps of decodes that ran from a captured graph"),
    *(Counter(f"misses.{reason}") for reason in MissReason),
    *(Counter(f"finished.{reason}") for reason in FinishReason),
)

OF_FAILURES: Final = (
    Counter("failed_steps"),
    Counter("recoveries", "Times that the engine started over after failed steps"),
    Counter("books_cleared", "Recoveries that freed all memory"),
    Counter("leaked_pages", "Pages that nobody owned and that were set aside"),
)

OF_SCHEDULER: Final = (*OF_REQUESTS, *OF_FAILURES)

OF_TIERS: Final = (
    Counter("tier_stored_tokens", "Tokens that the prefix cache copied to its tiers behind the device"),
    Counter("tier_lost_stores", "Copies to there that failed: too much was still to be written"),
    Counter("tier_loaded_tokens", "Tokens that were copied back from there"),
    Counter("tier_lost_loads", "Copies from there that failed"),
    Counter("tier_prefixes_given_up", "Kept prefixes that lost their retention there before its time, to make room"),
    Counter("cache_checks", "Entries of the prefix cache that were computed again and compared"),
    Counter("cache_checked_tokens", "Tokens of these entries"),
    *(Counter(f"cache_divergence.{mover}") for mover in MOVERS),
)

OF_POOLS: Final = (
    Counter("evicted_pages", "Pages dropped from the prefix cache to make room"),
    Counter("prefixes_given_up", "Kept prefixes that lost their retention before its time, to make room"),
    Counter("ledger_violations", "Slots that were freed, taken or used against the rules"),
)

STEP_TOKENS: Final = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histogram of steps by their tokens; larger steps are in `engine.steps` alone."""

OF_ENGINE: Final = (
    Counter("engine.steps", "Steps that the engine committed"),
    Counter("engine.step_tokens"),
    *(Counter(f"engine.step_tokens_{bound}") for bound in STEP_TOKENS),  # steps of as many tokens, or fewer
    Counter("engine.step_failures", "Steps that cost their choices an error"),
    Counter("engine.refused", "Choices that the engine refused before they were queued"),
    Counter("engine.host_seconds", "Seconds spent planning and committing steps"),
    Counter("engine.steps_ahead", "Steps that began before the one before them had ended"),
    Counter("engine.steps_on_ranks", "Steps that several ranks executed"),
    Counter("engine.busy_seconds", "Seconds spent in steps, the model's part included"),
    Counter("engine.check_seconds", "Seconds of an idle engine spent on checks of the prefix cache"),
)

COUNTERS: Final = (*OF_SCHEDULER, *OF_KINDS, *OF_PICTURES, *OF_TIERS, *OF_POOLS, *OF_ENGINE)


def zeros(counters: tuple[Counter, ...]) -> dict[str, float]:
    """Return a new count of 0 for each of `counters`, by name."""
    return dict.fromkeys((counter.name for counter in counters), 0.0)
