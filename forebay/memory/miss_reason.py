"""Why the prefix cache could not give more."""

from enum import StrEnum
from typing import Final


class MissReason(StrEnum):
    """Why a prompt's tokens were not all taken from the prefix cache (C20)."""

    NONE = "none"  # everything that can be cached was
    DISABLED = "cache_disabled"
    EMPTY = "no_shared_prefix"  # nothing in this namespace begins like that
    DIVERGED = "diverged"  # a cached prompt continues differently from here
    NOT_CACHED = "not_cached_yet"  # the rest was never computed, or only by requests still running
    EVICTED = "evicted"  # it was there once
    EVICTED_FROM_DISK = "evicted_from_disk"  # it was in a file once
    NOT_LOADED_IN_TIME = "not_loaded_in_time"  # another tier has it, and copying it failed or took longer
    RELEASED = "released"  # it was there until the caches' memory was given back
    BELOW_PAGE = "below_page"  # the prompt is shorter than a page
    STATE_MISSING = "kv_present_state_missing"  # the KV is there, no recurrent state is to go on from
    WINDOW_MISSING = "kv_present_window_missing"  # the KV is there, that of a sliding window is not
    PROMPT_LOGPROBS = "prompt_logprobs"  # every position must be computed
    POOLING = "pooling"  # the same: the vector wanted is of the first token, or of all


NEVER_REUSED: Final = (MissReason.DISABLED, MissReason.PROMPT_LOGPROBS, MissReason.POOLING)
"""A request whose match has one of these reasons reuses no prefix, however long."""
