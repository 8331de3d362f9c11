"""Declaration of a kind of cache: its host side, its part of a plan, and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from forebay.base.parts import Part
from forebay.config.engine_config import NO_HISPARSE, HisparseOptions, KindOptions, SchedulerConfig, SchedulingOptions
from forebay.memory.budget import KindDemand
from forebay.memory.kinds.kind import Kind
from forebay.memory.req_to_token_pool import ReqToTokenPool


class KindSize(NamedTuple):
    """Sizes of a kind over all layers.

    `num_bytes` are for one token of a kind that has pages, else for one slot. `num_read` tokens of a sequence are read
    at most, the widest of all layers, since a page is kept or given back for all layers together; 0: all.
    `inputs_bytes` are kept of each token until it is certain that it stays. `num_layers`: of the layers whose KV is in
    the host tier. `page_bytes` are those of a page whatever its tokens.
    """

    num_bytes: int
    num_read: int = 0
    inputs_bytes: int = 0
    num_layers: int = 0
    page_bytes: int = 0


class CacheSizes(NamedTuple):
    """Bytes over all layers: `kv_bytes_per_token` of full KV, and by name the sizes of the other kinds that layers
    keep."""

    kv_bytes_per_token: int
    kinds: Mapping[str, KindSize] = {}

    def num_bytes(self, kind: str) -> int:
        """Return the bytes of a kind, for a token or slot; 0 where no layer keeps it."""
        return self.kinds[kind].num_bytes if kind in self.kinds else 0

    def num_read(self, kind: str) -> int:
        """Return how many tokens of a sequence are read of a kind; 0 for all, or where no layer keeps it."""
        return self.kinds[kind].num_read if kind in self.kinds else 0

    @property
    def inputs_bytes_per_token(self) -> int:
        return sum(size.inputs_bytes for size in self.kinds.values())


class Sizing(NamedTuple):
    """The settings that decide how many slots a kind asks for.

    Steps have up to `width` tokens of a decode. `num_certain` requests, of a decode server, have slots regardless of
    the configured number.
    """

    sizes: CacheSizes
    page_size: int
    options: KindOptions
    scheduling: SchedulingOptions
    width: int
    num_certain: int = 0
    hisparse: HisparseOptions = NO_HISPARSE


class DeclaredKind(NamedTuple):
    """Declaration of a kind of cache.

    `demand` is asked only where layers keep something of this kind; `make` returns None where memory was divided
    without it. `of_a_request` describes the memory of a request that does not grow with its length.
    """

    kind: type[Kind]
    work: type[Part]
    demand_type: type[KindDemand]
    demand: Callable[[KindSize, Sizing], KindDemand]
    make: Callable[[SchedulerConfig, ReqToTokenPool], Kind | None]
    of_a_request: Callable[[KindSize], str]

    @property
    def name(self) -> str:
        return self.kind.name
