"""C23: where the two tiers of KV lie, and how large they may be."""

from __future__ import annotations

import mmap

import pytest
import torch

from forebay.base.errors import ConfigError
from forebay.pools.table import Column
from forebay.pools.tiers import HotRows, Tiers

PAGE, COLUMNS, ROWS, RESIDENT = 4, 8, 3, 5
ALIGN = max(4096, mmap.PAGESIZE)
INT32 = 1 << 31  # locations from 0


def tiers_of(num_pages: int, taken: list[tuple[int, int]] | None = None) -> Tiers:
    def take(device: int, host: int) -> torch.Tensor:
        if taken is not None:
            taken.append((device, host))
        return torch.zeros(device + host, dtype=torch.uint8)

    rows = HotRows(ROWS, sizes={"S": COLUMNS, "P": PAGE})
    return Tiers(rows, num_columns=COLUMNS, page_size=PAGE, num_pages=num_pages, num_resident=RESIDENT, take=take)


def test_tiers_hot_buffers_follow_the_copies_and_the_host_tier_begins_on_a_page_of_memory() -> None:
    layout = tiers_of(7).layout
    assert layout.hot_base == RESIDENT * PAGE
    assert layout.host_base == ALIGN >= layout.hot_base + ROWS * (COLUMNS + PAGE)


def test_tiers_column_takes_its_bytes_of_each_tier_and_counts_those_of_the_copies() -> None:
    taken: list[tuple[int, int]] = []
    tiers = tiers_of(7, taken)
    keys = tiers.column("0.k", Column(torch.bfloat16, (PAGE, 2, 3), pad=0))
    scales = tiers.column("0.scales", Column(torch.uint8, (PAGE, 2), pad=0))
    assert taken == [(ALIGN * 12, 7 * PAGE * 12), (ALIGN * 2, 7 * PAGE * 2)]
    assert tiers.resident_bytes == RESIDENT * PAGE * (12 + 2)
    assert keys.shape == (7, PAGE, 2, 3)
    assert scales.shape == (7, PAGE, 2)
    keys[6, PAGE - 1] = 1
    whole = tiers._columns["0.k"]
    assert whole[-1].all()
    assert not whole[:-1].any()


def test_tiers_locations_beyond_32_bits_are_refused_with_their_number_and_the_last_is_not() -> None:
    """The kernels hold a location in an int32."""
    most = (INT32 - ALIGN) // PAGE
    layout = tiers_of(most).layout
    assert layout.host_base + most * PAGE == INT32
    with pytest.raises(ConfigError, match=r"2,147,483,652 locations, at most 2,147,483,648: lower --kv-cache-bytes"):
        tiers_of(most + 1)


def test_tiers_reset_of_padding_zeroes_its_page_and_its_hot_buffer_and_no_other() -> None:
    """C14: steps write the KV of padding rows there."""
    tiers = tiers_of(7)
    tiers.column("0.k", Column(torch.float32, (PAGE, 1, 1), pad=0))
    tiers.rows.active[:] = 1
    whole = tiers._columns["0.k"].view(-1)
    whole[:] = torch.nan
    tiers.reset_padding()
    own = RESIDENT * PAGE
    zeros = [*range(PAGE), *range(own, own + COLUMNS + PAGE)]
    assert not whole[zeros].any()
    assert int(whole.isnan().sum()) == len(whole) - len(zeros)
    assert tiers.rows.active.tolist() == [0, 1, 1]
