"""What a request needs. Admission, allocation and retraction all ask here, so that they cannot disagree."""

from __future__ import annotations

from forebay.base.units import ceil_div


def footprint(kv_len: int, page_size: int, held_pages: int = 0) -> int:
    """Pages that a request must still be given so that `kv_len` tokens have KV, when it holds `held_pages` already."""
    return max(0, ceil_div(kv_len, page_size) - held_pages)


def final_kv_len(num_prompt: int, max_new_tokens: int) -> int:
    """KV positions a request ever writes: the last sampled token is never read back, so it has none."""
    return num_prompt + max_new_tokens - 1
