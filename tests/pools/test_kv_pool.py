from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forebay.pools.kv_pool import KvPool


def pool(num_pages: int = 4, page_size: int = 3, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=2,
        head_dim=5,
        dtype=dtype,
        device="cpu",
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_has_zeros_of_its_own_with_one_page_more_than_can_be_used(dtype):
    kv = pool(dtype=dtype)
    for layer in range(2):
        for side in (kv.k(layer), kv.v(layer)):
            assert side.shape == (5 * 3, 2, 5)
            assert side.dtype == dtype
            assert side.is_contiguous()
            assert not side.any()
    kv.k(0).fill_(1)
    assert not kv.v(0).any()
    assert not kv.k(1).any()
    assert kv.num_bytes == 2 * 2 * 15 * 10 * dtype.itemsize


def test_reset_padding_zeroes_page_zero_alone():
    """C14"""
    kv = pool()
    for layer in range(2):
        kv.k(layer).fill_(float("nan"))
        kv.v(layer).fill_(2.0)
    kv.reset_padding()
    for layer in range(2):
        assert not kv.k(layer)[:3].any()
        assert not kv.v(layer)[:3].any()
        assert kv.k(layer)[3:].isnan().all()
        assert (kv.v(layer)[3:] == 2.0).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_large_cache_takes_no_memory_until_it_is_written():
    before = resident_bytes()
    kv = pool(num_pages=200_000, page_size=16, num_layers=1)
    assert kv.num_bytes > 240 << 20
    assert resident_bytes() - before < 32 << 20
    kv.k(0)[: 64 << 14].fill_(1.0)
    assert resident_bytes() - before >= 32 << 20
