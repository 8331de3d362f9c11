"""C23: how many resident copies and hot buffers HiSparse asks for, in pages and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.config.engine_config import HisparseOptions, KindOptions, SchedulingOptions
from forebay.memory.budget import KV, MemoryBudget, MemoryDemand
from forebay.memory.kinds.declared import CacheSizes, KindSize, Sizing
from forebay.memory.kinds.resident.declaration import RESIDENT_COPIES, ResidentDemand, hot_row_bytes

PAGE, TOKEN_BYTES = 16, 100
DEMAND = MemoryDemand(
    kv_cache_bytes=1 << 20,
    kv_bytes_per_token=TOKEN_BYTES,
    page_size=PAGE,
    max_running_requests=4,
    context_length=1024,
    hot_tokens=64,
    hot_row_bytes=9_000,
)


def resident(ratio: float, chunk: int) -> ResidentDemand:
    sizing = Sizing(
        CacheSizes(TOKEN_BYTES, {}),
        PAGE,
        KindOptions(),
        SchedulingOptions(chunked_prefill_size=chunk),
        1,
        hisparse=HisparseOptions(device_buffer_size=64, host_to_device_ratio=ratio),
    )
    made = RESIDENT_COPIES.demand(KindSize(TOKEN_BYTES), sizing)
    assert isinstance(made, ResidentDemand)
    return made


def test_hot_row_bytes_are_its_columns_with_their_notes_and_its_newest_page() -> None:
    size = KindSize(TOKEN_BYTES, num_layers=3)
    # 64 columns and the newest page of KV, a position and a time of use for each column and layer, 4 bytes a new token
    assert hot_row_bytes(64, PAGE, size) == (64 + 16) * 100 + 64 * 3 * 8 + 16 * 4
    assert hot_row_bytes(0, PAGE, size) == 0


@pytest.mark.parametrize(
    ("ratio", "chunk", "requests", "pages"),
    [
        (2.0, 256, 0, 16),  # a chunk
        (2.0, 250, 0, 16),  # begun pages count
        (2.0, 5_000, 0, 64),  # no chunk is longer than the context
        (2.0, 256, 3, 16 + 3 * 2),  # half of the four pages of each request's hot buffer
        (4.0, 256, 3, 16 + 3),
        (10_000.0, 256, 3, 16 + 3),  # at least a thousandth
    ],
)
def test_resident_pages_are_at_least_those_of_a_chunk_and_a_share_of_each_requests(
    ratio: float, chunk: int, requests: int, pages: int
) -> None:
    assert resident(ratio, chunk).least(DEMAND, requests) == pages


@pytest.mark.parametrize(
    ("in_file", "where"),
    [(0, "host memory, part of the KV cache"), (TOKEN_BYTES, "a file, or a GPU's host memory, beside this memory")],
)
def test_budget_lines_give_tokens_and_bytes_of_copies_buffers_and_host_tier(in_file: int, where: str) -> None:
    kind = resident(2.0, 256)
    budget = MemoryBudget(
        page_size=PAGE,
        num_slots={KV: 99, kind.name: 20},
        max_running_requests=3,
        context_length=1024,
        demand=replace(DEMAND, host_bytes_per_token=in_file, kinds=(kind,)),
        num_bytes={kind.name: 21 * 1600},
        row_bytes=0,
    )
    assert [tuple(line) for line in kind.lines(budget, "")] == [
        (
            "resident pages",
            "20 x 16 tokens = 320 tokens",
            "one for 2 KV pages (host_to_device_ratio), for prompts that are computed",
        ),
        ("resident cache", "32.8 KiB", "(20 + 1) pages, 100 B per token"),
        ("hot buffers", "35.2 KiB", "(3 + 1 padding) rows of 8.8 KiB, 64 tokens each"),
        ("host tier", "156.2 KiB", f"{where}: the KV of sparse attention"),
    ]
    assert kind.num_cached(budget, 2, 512) == 99
