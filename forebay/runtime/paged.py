"""Where a step's sequences have their KV."""

from __future__ import annotations

from torch import Tensor

from forebay.layers.context import PagedKv
from forebay.pools.request_rows import RequestRows
from forebay.pools.window_pages import WindowPages


def paged_kv(
    table: RequestRows, windows: WindowPages | None, rows: Tensor, out_cache_loc: Tensor, out_window_loc: Tensor
) -> tuple[PagedKv, PagedKv]:
    """For layers that keep all tokens, and for those with windows: the same where there are none. `rows` [S] int32,
    locations [T] int64."""
    pages = table.req_to_token
    full = PagedKv(page_table=pages, rows=rows, out_cache_loc=out_cache_loc)
    if windows is None:
        return full, full
    window = PagedKv(page_table=pages, rows=rows, out_cache_loc=out_window_loc, page_map=windows.full_to_window)
    return full, window
