"""What a request needs. Admission, allocation and retraction all ask here, so that they cannot disagree."""

from __future__ import annotations

from forebay.base.units import ceil_div


def footprint(kv_len: int, page_size: int, held_pages: int = 0) -> int:
    """Pages that a request must still be given so that `kv_len` tokens have KV, when it holds `held_pages` already."""
    return max(0, ceil_div(kv_len, page_size) - held_pages)


def window_margin(page_size: int, track_interval: int) -> int:
    """Tokens behind its window whose window pages a request still holds. The place from which others will resume then
    has a whole window: the last page's end, or where its state was tracked last (`track_interval` 0: it is not
    tracked)."""
    return page_size + track_interval


def window_pages_per_request(window: int, page_size: int, depth: int, track_interval: int = 0) -> int:
    """Window pages that a request needs at most for the tokens it still reads and the margin behind them, with `depth`
    more steps in flight and a page begun at either end."""
    return ceil_div(window - 1 + depth + window_margin(page_size, track_interval), page_size) + 2


def window_pages_in_flight(chunked_prefill_size: int, page_size: int, depth: int) -> int:
    """Window pages that chunks fill at most before the window moves past them. They are those of the step that is
    planned, of `depth` steps in flight, and of as many committed steps whose requests have ended and wait for those in
    flight."""
    return (2 * depth + 1) * ceil_div(chunked_prefill_size, page_size)


def tracking_slots(extra_buffer: bool, depth: int) -> int:
    """State slots that a request tracks its state in: none without the extra buffer; with overlap two, so that a step
    in flight writes one while the other's state is complete."""
    return 0 if not extra_buffer else 2 if depth else 1


def final_kv_len(num_prompt: int, max_new_tokens: int) -> int:
    """KV positions a request ever writes: the last sampled token is never read back, so it has none."""
    return num_prompt + max_new_tokens - 1
