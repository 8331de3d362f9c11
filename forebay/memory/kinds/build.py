"""The kinds of cache beside full KV that there are, and those of one engine.

A new kind is one more entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.budget import KindDemand
from forebay.memory.kinds.declared import CacheSizes, DeclaredKind, Sizing
from forebay.memory.kinds.kind import Kinds
from forebay.memory.kinds.resident.declaration import RESIDENT_COPIES
from forebay.memory.kinds.ring.declaration import STATE_RINGS
from forebay.memory.kinds.state.declaration import RECURRENT_STATES, make_rows
from forebay.memory.kinds.window.declaration import SLIDING_WINDOWS
from forebay.memory.kv_allocator import KV
from forebay.memory.req_to_token_pool import ReqToTokenPool

__all__ = [
    "COUNTERS",
    "KINDS",
    "describe_request",
    "has_pages",
    "make_demands",
    "make_kinds",
    "make_rows",
    "per_request",
    "per_token",
]

# In the order in which they are named where a hit ends for several reasons.
KINDS: Final[tuple[DeclaredKind, ...]] = (RECURRENT_STATES, SLIDING_WINDOWS, RESIDENT_COPIES, STATE_RINGS)
KIND_OF: Final[Mapping[str, DeclaredKind]] = {declared.name: declared for declared in KINDS}
# Full KV and the kinds beside it, in the order of tables and reports.
CACHES: Final = (KV, *(declared.name for declared in reversed(KINDS)))
COUNTERS: Final = tuple(counter for declared in reversed(KINDS) for counter in declared.kind.COUNTERS)


def has_pages(kind: str) -> bool:
    """Return True if a cache has entries by token, in pages: full KV, and kinds that follow its pages. Else a sequence
    has one slot."""
    return kind == KV or KIND_OF[kind].kind.of_pages


def per_token(sizes: CacheSizes) -> int:
    """Return the bytes of a token: full KV, and of the kinds that have pages, but for copies of full KV."""
    paged = (size for name, size in sizes.kinds.items() if KIND_OF[name].kind.of_pages and not size.num_layers)
    return sizes.kv_bytes_per_token + sum(size.num_bytes for size in paged)


def per_request(sizes: CacheSizes) -> int:
    """Return the bytes of a request that do not depend on its length: of the kinds with a slot for each sequence."""
    return sum(size.num_bytes for name, size in sizes.kinds.items() if not KIND_OF[name].kind.of_pages)


def describe_request(sizes: CacheSizes) -> list[str]:
    """Describe the memory of a request that does not grow with its length, in words."""
    return [KIND_OF[name].of_a_request(size) for name, size in sizes.kinds.items()]


def make_demands(sizing: Sizing) -> tuple[KindDemand, ...]:
    """Make the demands of the kinds that layers keep."""
    kept = sizing.sizes.kinds
    return tuple(declared.demand(kept[declared.name], sizing) for declared in reversed(KINDS) if declared.name in kept)


def make_kinds(config: SchedulerConfig, rows: ReqToTokenPool) -> Kinds:
    """Make the kinds that memory was divided for."""
    made = (declared.make(config, rows) for declared in KINDS)
    return Kinds(kind for kind in made if kind is not None)
