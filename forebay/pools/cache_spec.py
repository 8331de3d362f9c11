"""Declarations of the cache that a layer keeps of past tokens, as named columns. A model returns its layers' specs;
outside of `pools` no code depends on the type of a spec.

Sizing, the tables that hold the bytes, copies and snapshots are all derived from the columns. No torch: planning needs
them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple

from forebay.base.scan_rows import part_offsets
from forebay.base.units import ceil_div
from forebay.config.engine_config import CacheTypes
from forebay.config.rules import ITEM_BYTES
from forebay.memory.kinds.build import has_pages
from forebay.memory.kinds.declared import CacheSizes, KindSize
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.memory.kinds.ring.rings import RING
from forebay.memory.kinds.state.hybrid_rows import STATE
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kv_allocator import KV

PER_PAGE: Final = 0
_CODES: Final = {"int8": "int8", "fp8": "uint8"}  # of types of KV that have a scale for each token and head
_PAIR_WIDTH: Final = 8  # the widest steps of a decode engine whose rings are those of any prefill engine


class Tier(StrEnum):
    """The memory that holds a column: the device's, or host memory or a file behind it (HiSparse)."""

    DEVICE = "device"
    HOST = "host"


class CacheColumn(NamedTuple):
    """Entries of `shape` and `dtype`: of the kinds of cache that have pages one for `tokens` tokens, or `PER_PAGE`,
    else one per slot. `per` is the name of the kind that allocates them."""

    name: str
    per: str
    shape: tuple[int, ...]
    dtype: str
    tier: Tier = Tier.DEVICE
    tokens: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes of an entry."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def entries(self, page_size: int) -> tuple[int, ...]:
        """Return the leading dimension of a page's entries; () if it has one entry."""
        return (page_size // self.tokens,) if self.tokens else ()


class CacheSpec:
    """Declaration of the cache of one layer. The defaults are those of full KV."""

    __slots__ = ()

    kind: ClassVar[str] = KV  # the kind of cache that allocates the columns

    @property
    def num_read(self) -> int:
        """The last tokens that a query reads; 0: all."""
        return 0

    @property
    def inputs_per_token(self) -> int:
        """Entries in the model's dtype that are kept of each token until it is certain that the token stays."""
        return 0

    @property
    def values_within_keys(self) -> int:
        """The size of values that are the first entries of their keys; 0: values have a column of their own."""
        return 0

    @property
    def on_device(self) -> CacheSpec:
        """Return the spec of a layer that drafts, of a model or a head: all columns are in the device tier."""
        return self

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        """Return the columns, with the dtypes that `types` sets."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention(CacheSpec):
    """K and V of every token. `v_head_dim` 0: as `head_dim`."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return _heads(self, types)

    def __str__(self) -> str:
        return f"KV of all tokens, {_sizes(self)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(CacheSpec):
    """Multi-head latent attention: one vector per token, whose first `rank` entries are the values of all heads and
    which, with the rotated key's `rope_dim` entries behind them, is the key of all heads. `sparse`: a query reads few
    tokens, so that with HiSparse the vectors are in the host tier."""

    rank: int
    rope_dim: int
    sparse: bool = False

    @property
    def values_within_keys(self) -> int:
        return self.rank

    @property
    def on_device(self) -> CacheSpec:
        return replace(self, sparse=False)

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        columns = _kv(self.kind, types, k=(1, self.rank + self.rope_dim))
        if not (self.sparse and types.sparse_kv_on_host):
            return columns
        return tuple(column._replace(tier=Tier.HOST) for column in columns)

    def __str__(self) -> str:
        return f"latent KV of all tokens, {self.rank} + {self.rope_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexKeys(CacheSpec):
    """One key per token, by which an indexer selects the tokens that sparse attention reads."""

    head_dim: int

    @property
    def values_within_keys(self) -> int:
        return self.head_dim

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return _kv(self.kind, types, k=(1, self.head_dim))

    def __str__(self) -> str:
        return f"index keys of all tokens, {self.head_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow(CacheSpec):
    """K and V; a query reads itself and the `window` - 1 tokens before it. Older tokens' pages are given back.
    `v_head_dim` 0: as `head_dim`."""

    kind: ClassVar[str] = WINDOW

    num_kv_heads: int
    head_dim: int
    window: int
    v_head_dim: int = 0

    @property
    def num_read(self) -> int:
        return self.window

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return _heads(self, types)

    def __str__(self) -> str:
        return f"KV of the last {self.window} tokens, {_sizes(self)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWindow(CacheSpec):
    """One key per token, which is its value, too; a query reads itself and the `window` - 1 tokens before it."""

    kind: ClassVar[str] = WINDOW

    head_dim: int
    window: int

    @property
    def num_read(self) -> int:
        return self.window

    @property
    def values_within_keys(self) -> int:
        return self.head_dim

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return _kv(self.kind, types, k=(1, self.head_dim))

    def __str__(self) -> str:
        return f"keys of the last {self.window} tokens, {self.head_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedKv(CacheSpec):
    """One entry of `width` for each `rate` tokens: a key, which is its value, too."""

    rate: int
    width: int

    @property
    def values_within_keys(self) -> int:
        return self.width

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        return tuple(column._replace(tokens=self.rate) for column in _kv(self.kind, types, k=(1, self.width)))

    def __str__(self) -> str:
        return f"an entry of {self.rate} tokens, {self.width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStates(CacheSpec):
    """The states of tokens until their block of `rate` tokens has become an entry, of which two of `width` in the
    model's dtype: in a ring per request row, since no block is open where a page ends. A step reads the block's tokens
    before its own, and then writes up to `CacheTypes.width`, of which the first may be the only one that stays."""

    kind: ClassVar[str] = RING

    rate: int
    width: int

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        shape = (self.ring(types), self.width)
        return tuple(CacheColumn(name, self.kind, shape, types.dtype, tokens=PER_PAGE) for name in ("kv", "gate"))

    def ring(self, types: CacheTypes) -> int:
        """Return the places of a ring."""
        return self.num_before + max(types.width, _PAIR_WIDTH if types.movable else 1) - 1

    @property
    def num_before(self) -> int:
        """Tokens before its own that a step reads."""
        return self.rate - 1

    def __str__(self) -> str:
        return f"states of the last {self.rate} tokens, twice {self.width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPositions(BlockStates):
    """The `width` rotary positions of each token of an open block, in places as `BlockStates` has. They are float32,
    exact below 2^24."""

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        shape = (self.ring(types), self.width)
        return (CacheColumn("positions", self.kind, shape, "float32", tokens=PER_PAGE),)

    def __str__(self) -> str:
        return f"{self.width} rotary positions of the last {self.rate} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlappingBlockStates(BlockStates):
    """As `BlockStates`, of a block and the one before it: in a ring per page of the window, since those of the page
    before are read at the beginning of a page. If `movable`, each token has a place: another engine's pages may begin
    elsewhere."""

    kind: ClassVar[str] = WINDOW

    @property
    def num_read(self) -> int:
        return 2 * self.rate

    @property
    def num_before(self) -> int:
        return 2 * self.rate - 1

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        if not types.movable:
            return BlockStates.columns(self, types)
        return tuple(CacheColumn(name, self.kind, (self.width,), types.dtype) for name in ("kv", "gate"))

    def __str__(self) -> str:
        return f"states of the last {2 * self.rate} tokens, twice {self.width}"


class RecentInputs(NamedTuple):
    """Entries of one token: each is a part of a slot's row of its own, those in float32 first."""

    float32: tuple[int, ...] = ()
    model: tuple[int, ...] = ()


NO_RECENT_INPUTS: Final = RecentInputs()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentState(CacheSpec):
    """A state of fixed size: `conv` are the last inputs of a causal convolution, `[kernel - 1, channels]`, in the
    model's dtype; `ssm` is the state that a scan carries on, of any shape, in the dtype of `--mamba-ssm-dtype`. () for
    none. `inputs` counts the entries in the model's dtype that a token needs until it is certain that it stays
    (decision 34); entries in float32 count twice. `recent` are the entries of a token, in float32 and in the model's
    dtype, that scans in chunks keep of each token of the open chunk, behind the state (`base.scan_rows`)."""

    kind: ClassVar[str] = STATE

    conv: tuple[int, ...] = ()
    ssm: tuple[int, ...] = ()
    inputs: int = 0
    recent: RecentInputs = NO_RECENT_INPUTS

    @property
    def inputs_per_token(self) -> int:
        return self.inputs

    def columns(self, types: CacheTypes) -> tuple[CacheColumn, ...]:
        ssm = self._row(types) if types.chunked_scans and self.recent != NO_RECENT_INPUTS else self.ssm
        parts = (("conv", self.conv, types.dtype), ("ssm", ssm, types.mamba_ssm_dtype))
        return tuple(CacheColumn(name, self.kind, shape, dtype) for name, shape, dtype in parts if shape)

    def _row(self, types: CacheTypes) -> tuple[int, ...]:
        """Return the shape of a slot's row, which has a state and the recent inputs."""
        state, recent = ITEM_BYTES[types.mamba_ssm_dtype], self.recent
        sizes = [*(4 * count for count in recent.float32), *(ITEM_BYTES[types.dtype] * n for n in recent.model)]
        return (part_offsets(math.prod(self.ssm) * state, sizes)[-1] // state,)

    def __str__(self) -> str:
        parts = (("convolution", self.conv), ("scan", self.ssm))
        return "state: " + ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in parts if shape)


def _heads(spec: FullAttention | SlidingWindow, types: CacheTypes) -> tuple[CacheColumn, ...]:
    heads, values = spec.num_kv_heads, spec.v_head_dim or spec.head_dim
    return _kv(spec.kind, types, k=(heads, spec.head_dim), v=(heads, values))


def _sizes(spec: FullAttention | SlidingWindow) -> str:
    values = f" and {spec.v_head_dim}" if spec.v_head_dim not in (0, spec.head_dim) else ""
    return f"{spec.num_kv_heads} heads x {spec.head_dim}{values}"


def _kv(per: str, types: CacheTypes, **shapes: tuple[int, int]) -> tuple[CacheColumn, ...]:
    """Heads of each token; of 8-bit ones their scales as well. Codes of FP8 are bytes."""
    dtype = _CODES.get(types.kv_cache_dtype, types.kv_cache_dtype)
    columns = [CacheColumn(name, per, shape, dtype) for name, shape in shapes.items()]
    if dtype in _CODES.values():
        columns += [CacheColumn(f"{name}_scale", per, shape[:1], "float32") for name, shape in shapes.items()]
    return tuple(columns)


def cache_sizes(specs: Iterable[CacheSpec], types: CacheTypes) -> CacheSizes:
    """Return the bytes of all layers together, by kind of cache. The resident copies of KV in the host tier are a kind
    of their own."""
    num_bytes, page_bytes, num_read, inputs = (Counter[str]() for _ in range(4))
    num_layers = 0
    for spec in specs:
        columns = spec.columns(types)
        for column in columns:
            if column.tokens == PER_PAGE and has_pages(column.per):
                page_bytes[column.per] += column.num_bytes
            else:
                num_bytes[column.per] += ceil_div(column.num_bytes, column.tokens or 1)
            num_bytes[RESIDENT] += column.num_bytes * (column.tier is Tier.HOST)
        num_layers += any(column.tier is Tier.HOST for column in columns)
        num_read[spec.kind] = max(num_read[spec.kind], spec.num_read)
        inputs[spec.kind] += spec.inputs_per_token * ITEM_BYTES[types.dtype]
    kinds = {
        name: KindSize(
            num_bytes[name], num_read[name], inputs[name], num_layers if name == RESIDENT else 0, page_bytes[name]
        )
        for name in sorted(num_bytes, reverse=True)
        if name != KV and num_bytes[name]
    }
    return CacheSizes(num_bytes[KV], kinds)
