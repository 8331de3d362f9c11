"""The events of an engine's prefix cache, by its configuration."""

from __future__ import annotations

import time
from functools import partial

from forebay.config.engine_config import EngineConfig
from forebay.memory.adapters import AdapterLoad, Adapters
from forebay.memory.cache_events import CacheEvents, Salt, Source
from forebay.memory.tier import DEVICE, DISK, HOST, Tier
from forebay.scheduler.scheduler import Scheduler


def make_cache_events(config: EngineConfig, scheduler: Scheduler) -> CacheEvents | None:
    """Return the events of all tiers of the prefix cache; None if they are not wanted, or nothing is cached."""
    options = config.events
    if not (options.cache_events and config.scheduling.radix_cache):
        return None
    return events_of(scheduler, config.device, options.event_key, with_tokens=options.event_tokens)


def events_of(scheduler: Scheduler, device: str, key: bytes, *, with_tokens: bool) -> CacheEvents:
    """Return the events of a scheduler's prefix cache. A device that is the CPU and host memory are two media."""
    media = {DEVICE: "CPU" if device == "cpu" else "GPU", HOST: "HOST" if device == "cpu" else "CPU", DISK: "STORAGE"}
    tiers, adapters = scheduler.memory.tiers, scheduler.pools.adapters
    sources = [_source(tier, media[tier.name], adapters) for tier in (tiers.device, *tiers.all)]
    return CacheEvents(sources, key, time.time, with_tokens=with_tokens)


def _source(tier: Tier, medium: str, adapters: Adapters) -> Source:
    return Source(tier, medium, partial(durable_salt if tier.durable else salt_of, adapters=adapters))


def salt_of(namespace: str, adapters: Adapters) -> Salt:
    """Return the salt of a namespace that has the version of the weights and the number of the adapter's load
    (`Request.compute_with`). Versions count the updates since the start; the first one has the salt of files."""
    weights, _, client = namespace.partition("/")
    version, has_adapter, number = weights.partition("+")
    load = next((load for load in _loads(adapters) if str(load.number) == number), None)
    name = load.digest if load and load.digest else number
    first = version == "0" and (not has_adapter or (load is not None and bool(load.digest)))
    salt = f"{name}/{client}" if first else f"{version}+{name}/{client}"
    return Salt(salt, client, (load.name if load else f"#{number}") if has_adapter else None)


def durable_salt(namespace: str, adapters: Adapters) -> Salt:
    """Return the salt of a namespace in files, which has the digest of the adapter (`Request.durable_namespace`)."""
    digest, _, client = namespace.partition("/")
    name = next((load.name for load in _loads(adapters) if load.digest == digest), f"#{digest}")
    return Salt(namespace, client, name if digest else None)


def _loads(adapters: Adapters) -> list[AdapterLoad]:
    """Return the loads that requests compute with, or have computed with."""
    return [*adapters.accepting, *adapters.draining]
