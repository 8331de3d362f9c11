"""A subscriber of the events of the prefix cache beside a simulation: after each turn it must know what the trees have.

python -m tests.simulation.published --seed 1234             replay one seed
python -m tests.simulation.published --seeds 0:500 --jobs 2
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import msgspec

from forebay.engine.loop.cache_events import durable_salt, events_of, salt_of
from forebay.memory.radix_node import Node
from forebay.memory.tier import Tier
from forebay.scheduler.scheduler import Scheduler
from tests.simulation import sleeping
from tests.simulation.command_line import command_line
from tests.simulation.event_log import Outcome
from tests.simulation.simulator import Simulation, run_seed
from tests.simulation.violation import require

KEY: Final = b"a key of the cluster, for hashes"
MEDIA: Final = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
KINDS: Final = {"state": "mamba", "window": "sliding_window"}

Cached = dict[tuple[str | None, str | None], set[int | bytes]]  # hashes by medium and kind of layers


class Event(msgspec.Struct):
    """An event as consumers decode it: fields that its type lacks, or that are null, are left out by some engines."""

    type: str
    block_hashes: list[int | bytes] = []
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class Batch(msgspec.Struct, array_like=True):
    """A message as consumers decode it."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Subscriber:
    """What a router knows: the hashes that are cached. It refuses what it must not be told."""

    def __init__(self) -> None:
        self._cached: defaultdict[tuple[str | None, int], set[int | bytes]] = defaultdict(set)
        self._kinds: dict[int, str | None] = {0: "full_attention"}
        self.num_stored = self.num_removed = self.num_cleared = 0

    def take(self, batches: Iterable[bytes]) -> None:
        """Apply batches in their order."""
        for batch in batches:
            for event in decode(batch).events:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        match event.type:
            case "BlockStored":
                cached, hashes = self._cached[event.medium, event.group_idx], set(event.block_hashes)
                require(len(hashes) == len(event.block_hashes), f"{event} has a hash twice")
                require(not hashes & cached, f"{event} has hashes that are stored already")
                kind = self._kinds.setdefault(event.group_idx, event.kv_cache_spec_kind)
                require(event.kv_cache_spec_kind in (kind, None), f"{event} is of another kind than {kind}")
                if event.group_idx == 0 and event.parent_block_hash is not None:
                    require(event.parent_block_hash in cached, f"{event} has an unknown parent")
                cached |= hashes
                self.num_stored += len(hashes)
            case "BlockRemoved":
                cached = self._cached[event.medium, event.group_idx]
                require(cached >= set(event.block_hashes), f"{event} has hashes that are not stored")
                cached -= set(event.block_hashes)
                self.num_removed += len(event.block_hashes)
            case "AllBlocksCleared":
                self._cached.clear()
                self.num_cleared += 1

    @property
    def cached(self) -> Cached:
        """Return the known hashes by medium and kind of layers."""
        return {(medium, self._kinds[group]): set(hashes) for (medium, group), hashes in self._cached.items() if hashes}


def of_trees(scheduler: Scheduler, key: bytes = KEY) -> Cached:
    """Return what the trees of all tiers have, hashed page by page."""
    tiers, found = scheduler.memory.tiers, defaultdict[tuple[str | None, str | None], set[int | bytes]](set)
    for tier in (tiers.device, *tiers.all):
        salt = partial(durable_salt if tier.durable else salt_of, adapters=scheduler.pools.adapters)
        for namespace, root in tier.cache.index.roots.items():
            before = blake2b(f"namespace {salt(namespace).name}".encode(), digest_size=8, key=key).digest()
            for child in root.children.values():
                for kind, hash_ in _below(tier, child, before, key):
                    found[MEDIA[tier.name], kind].add(hash_)
    return dict(found)


def _below(tier: Tier, node: Node, before: bytes, key: bytes) -> Iterator[tuple[str, int]]:
    page_bytes = tier.cache.index.page_bytes
    kept = {KINDS[name]: set(part.kept([node], node.pages).ends.tolist()) for name, part in tier.parts.items()}
    for number in range(len(node.pages)):
        page = node.key[number * page_bytes : (number + 1) * page_bytes]
        before = blake2b(before + page, digest_size=8, key=key).digest()
        hash_ = int.from_bytes(before, "big")
        yield "full_attention", hash_
        yield from ((kind, hash_) for kind, ends in kept.items() if number + 1 in ends)
    for child in node.children.values():
        yield from _below(tier, child, before, key)


class Publishing:
    """Mixed into a simulation: its events go to a subscriber after each turn."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.events = events_of(self.scheduler, "cuda", KEY, with_tokens=False)  # type: ignore[attr-defined]
        self.subscriber = Subscriber()

    def _turn(self) -> None:
        super()._turn()  # type: ignore[misc]
        self.subscriber.take(self.events.take())
        known, there = self.subscriber.cached, of_trees(self.scheduler)  # type: ignore[attr-defined]
        require(known == there, f"subscribers know {known}, and the trees have {there}")


class PublishingSimulation(Publishing, Simulation):
    pass


class PublishingSleeping(Publishing, sleeping.SleepingSimulation):
    pass


def run_published(seed: int) -> Outcome:
    """Run a seed by turns with one tier, with sleep and updates of the weights, and with tiers."""
    if seed % 3 == 1:
        return sleeping.run_seed(seed, make=PublishingSleeping)
    return run_seed(seed, tiers=seed % 3 == 2, tenants=seed % 2 == 1, make=PublishingSimulation)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.published", __doc__ or "", run_published, Outcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
