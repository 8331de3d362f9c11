"""Why the prefix cache could not give more."""

from enum import StrEnum


class MissReason(StrEnum):
    """Why a prompt's tokens were not all taken from the prefix cache (C20)."""

    NONE = "none"  # everything that can be cached was
    DISABLED = "cache_disabled"
    EMPTY = "no_shared_prefix"  # nothing in this namespace begins like that
    DIVERGED = "diverged"  # a cached prompt continues differently from here
    NOT_CACHED = "not_cached_yet"  # the rest was never computed, or only by requests still running
    EVICTED = "evicted"  # it was there once
    RELEASED = "released"  # it was there until the caches' memory was given back
    BELOW_PAGE = "below_page"  # the prompt is shorter than a page
    STATE_MISSING = "kv_present_state_missing"  # the KV is there, no recurrent state is to go on from
    WINDOW_MISSING = "kv_present_window_missing"  # the KV is there, that of a sliding window is not
    PROMPT_LOGPROBS = "prompt_logprobs"  # every position must be computed
    POOLING = "pooling"  # the same: the vector wanted is of the first token, or of all
