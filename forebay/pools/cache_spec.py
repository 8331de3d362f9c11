"""Declarations of the cache that a layer keeps of past tokens, as named columns. A model returns its layers' specs;
outside of `pools` nobody asks which.

Sizing, the tables that hold the bytes, copies and snapshots are all derived from the columns. No torch: planning needs
them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from forebay.config.engine_config import CacheTypes
from forebay.config.rules import ITEM_BYTES
from forebay.memory.kinds.declared import CacheSizes, KindSize


class Per(StrEnum):
    """The unit that a column has an entry for, by the name of the kind of cache that allocates it."""

    TOKEN = "kv"
    WINDOW_TOKEN = "window"  # of the last tokens only; the pages of older ones are given back
    SLOT = "state"  # of a sequence


class CacheColumn(NamedTuple):
    name: str
    per: Per
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention:
    """K and V of every token. `v_head_dim` 0: as `head_dim`."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        heads, values = self.num_kv_heads, self.v_head_dim or self.head_dim
        return _kv(Per.TOKEN, types, k=(heads, self.head_dim), v=(heads, values))

    def __str__(self) -> str:
        values = f" and {self.v_head_dim}" if self.v_head_dim not in (0, self.head_dim) else ""
        return f"KV of all tokens, {self.num_kv_heads} heads x {self.head_dim}{values}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: one vector per token, whose first `rank` entries are the values of all heads and
    which, with the rotated key's `rope_dim` entries behind them, is the key of all heads."""

    rank: int
    rope_dim: int

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return _kv(Per.TOKEN, types, k=(1, self.rank + self.rope_dim))

    def __str__(self) -> str:
        return f"latent KV of all tokens, {self.rank} + {self.rope_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """K and V; a query reads itself and the `window` - 1 tokens before it. Older tokens' pages are given back."""

    num_kv_heads: int
    head_dim: int
    window: int

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return _kv(Per.WINDOW_TOKEN, types, k=shape, v=shape)

    def __str__(self) -> str:
        return f"KV of the last {self.window} tokens, {self.num_kv_heads} heads x {self.head_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentState:
    """A state of fixed size: `conv` are the last inputs of a causal convolution, `[kernel - 1, channels]`, in the
    model's dtype; `ssm` is what a scan carries on, of any shape, in the dtype of `--mamba-ssm-dtype`. () for none.
    `inputs` are the entries in the model's dtype that are kept of each token where it is not certain yet whether it
    stays (decision 34), those in float32 counted twice."""

    conv: tuple[int, ...] = ()
    ssm: tuple[int, ...] = ()
    inputs: int = 0

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        parts = (("conv", self.conv, types.dtype), ("ssm", self.ssm, types.mamba_ssm_dtype))
        return tuple(CacheColumn(name, Per.SLOT, shape, dtype) for name, shape, dtype in parts if shape)

    def __str__(self) -> str:
        parts = (("convolution", self.conv), ("scan", self.ssm))
        return "state: " + ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in parts if shape)


CacheSpec = FullAttention | LatentAttention | SlidingWindow | RecurrentState


def _kv(per: Per, types: CacheTypes, **shapes: tuple[int, int]) -> tuple[CacheColumn, ...]:
    """Heads of each token; of 8-bit ones their scales as well."""
    dtype = types.kv_cache_dtype
    columns = [CacheColumn(name, per, shape, dtype) for name, shape in shapes.items()]
    if dtype == "int8":
        columns += [CacheColumn(f"{name}_scale", per, shape[:1], "float32") for name, shape in shapes.items()]
    return tuple(columns)


def cache_sizes(specs: Iterable[CacheSpec], types: CacheTypes) -> CacheSizes:
    specs, num_bytes = tuple(specs), Counter[Per]()
    for spec in specs:
        for column in spec.columns(types):
            num_bytes[column.per] += column.num_bytes
    width = max((spec.window for spec in specs if isinstance(spec, SlidingWindow)), default=0)
    inputs = sum(spec.inputs for spec in specs if isinstance(spec, RecurrentState)) * ITEM_BYTES[types.dtype]
    num_read, inputs_bytes = {Per.WINDOW_TOKEN: width}, {Per.SLOT: inputs}
    kinds = {
        per.value: KindSize(size, num_read.get(per, 0), inputs_bytes.get(per, 0))
        for per, size in sorted(num_bytes.items(), reverse=True)
        if per is not Per.TOKEN and size
    }
    return CacheSizes(num_bytes[Per.TOKEN], kinds)
