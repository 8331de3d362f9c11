"""Cache pools in tests: types from torch's, and all of a pool's bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forebay.config.engine_config import CacheTypes
from forebay.pools.cache_pool import CachePool
from forebay.pools.mover import Region


def cache_types(
    dtype: torch.dtype, ssm_dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> CacheTypes:
    name, ssm, kv = (str(given).removeprefix("torch.") for given in (dtype, ssm_dtype, kv_dtype or dtype))
    return CacheTypes(dtype=name, kv_cache_dtype="fp8" if kv == "uint8" else kv, mamba_ssm_dtype=ssm)


def all_tensors(cache: CachePool) -> Iterator[Tensor]:
    """By page, by window page and by state slot."""
    return (tensor for table in cache.tables.values() for tensor in table.tensors)


def regions_of(cache: CachePool) -> list[Region]:
    """The memory of every column, kind by kind."""
    return [region for kind in cache.tables for region in cache.mover.regions(kind)]
