"""Parts that a role adds to an engine: its scheduler's policy, and the transfers to or from its peers."""

from __future__ import annotations

import sys
from typing import Protocol

import torch

from forebay.base.errors import ConfigError
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions, EngineConfig
from forebay.engine.loop.exchange import Connected
from forebay.pools.cache_pool import CachePool
from forebay.pools.cuda_shared import shares_memory
from forebay.pools.regions import Regions, Tag
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.prefill_role import PrefillRole


class Listening(Connected, Protocol):
    """`instance` is this process's own name; `port` is where prefill listens, 0 on decode."""

    instance: str
    port: int


def shared_caches(config: EngineConfig) -> tuple[Tag, ...]:
    """Return the parts of memory that lie where a prefill process of this machine can write to them: decode's caches,
    if its transports map them. A GPU's caches are not shared if they can be released or have two tiers.
    Raises ConfigError if the library of a transport is not installed."""
    options = config.disaggregation
    if not options.is_decode or sys.platform != "linux":
        return ()
    if config.device != "cpu" and (config.enable_memory_saver or config.hisparse.enabled):
        return ()
    if config.device != "cpu" and not shares_memory(torch.device(config.device)):
        return ()
    from forebay.transfer.transports import maps_caches

    return (Tag.KV_CACHE,) if maps_caches(options.transfer_backend) else ()


def transfers_for(
    config: EngineConfig, cache: CachePool, vocab_size: int, kernels: str, regions: Regions
) -> Listening | None:
    """None without a role. Raises ConfigError where prefill cannot listen."""
    options = config.disaggregation
    if options.mode is DisaggregationMode.NULL:
        return None
    from forebay.transfer.worker import make_transfers

    place = regions.place if shared_caches(config) else None
    try:
        return make_transfers(config, cache, vocab_size=vocab_size, kernels=kernels, place=place)
    except OSError as error:
        raise ConfigError(
            f"{options.host}:{options.bootstrap_port} cannot be used ({error.strerror}): stop what listens there, or "
            "give --disaggregation-bootstrap-port"
        ) from error


def role_of(options: DisaggregationOptions, transfers: Listening | None) -> Handoff:
    """Return the scheduler's policy for transfers: none, decode's or prefill's."""
    if transfers is None:
        return Handoff()
    return DecodeRole(options, transfers.instance) if options.is_decode else PrefillRole(options)
