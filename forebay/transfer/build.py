"""Transfers as the configuration wants them."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.exposure import is_loopback
from forebay.config.engine_config import Chaos, DisaggregationOptions, EngineConfig, TransferBackend
from forebay.pools.cache_pool import CachePool
from forebay.pools.table import Region
from forebay.requests.pieces import KindShape
from forebay.transfer.session.layout import layout_of
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.frames import Layout
from forebay.transfer.wire.memory import HostMemory, Memory, OneSided, shapes_of
from forebay.transfer.wire.shm import Place, Shm, machine
from forebay.transfer.worker import Worker

_FLAG: Final = "--disaggregation-transfer-backend"
_SHARING: Final = sys.platform == "linux"


def make_transfers(
    config: EngineConfig, cache: CachePool, *, vocab_size: int, kernels: str, place: Place | None
) -> Worker:
    """Make the component that executes orders in the role of `config.disaggregation`; prefill listens from here on.
    `kernels` names the variant that computes; `place` says where other processes find the cache's addresses
    (`Regions.place`), None where they cannot. `close` ends it.

    Raises ConfigError for what cannot work, OSError where the port is taken.
    """
    layout = layout_of(cache, config, vocab_size=vocab_size, kernels=kernels)
    return transfers_of(config.disaggregation, cache, layout, place)


def transfers_of(options: DisaggregationOptions, cache: CachePool, layout: Layout, place: Place | None) -> Worker:
    _check(options, place)
    shapes, instance = shapes_of(cache), secrets.token_hex(16)
    memory, regions = memory_of(cache, shapes), [region for region in cache.regions() if region.kind in shapes]
    transports, one_sided = [str(options.transfer_backend)], dict[str, OneSided]()
    if options.transfer_backend is TransferBackend.AUTO:
        transports = ["shm", "tcp"] if _SHARING and (place is not None or options.is_prefill) else ["tcp"]
    if "shm" in transports:
        faults = Faults(options.chaos, time.monotonic)
        one_sided["shm"] = Shm(shapes, memory, regions, place, timeout_s=options.bootstrap_timeout_s, faults=faults)
    for name, make in _BY_LIBRARY.items():
        if name in transports:
            if not isinstance(memory, HostMemory):
                raise ConfigError(f"{_FLAG} {name} with a cache on a GPU: not in this version: use tcp")
            one_sided[name] = make(options, instance, shapes, memory, regions)
    return Worker(
        options,
        instance=instance,
        layout=layout,
        shapes=shapes,
        memory=memory,
        transports=transports,
        one_sided=one_sided,
        machine=machine() if _SHARING else "",
    )


def _nixl(
    options: DisaggregationOptions,
    instance: str,
    shapes: dict[str, KindShape],
    memory: HostMemory,
    regions: list[Region],
) -> OneSided:
    try:
        from forebay.transfer.wire.nixl import Nixl
    except ImportError as error:
        raise ConfigError(f"{_FLAG} nixl: {error}: use pip to install nixl-cu12, or auto, shm or tcp") from error
    return Nixl(instance, shapes, memory, regions)


def _mooncake(
    options: DisaggregationOptions,
    instance: str,
    shapes: dict[str, KindShape],
    memory: HostMemory,
    regions: list[Region],
) -> OneSided:
    try:
        from forebay.transfer.wire.mooncake import Mooncake
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG} mooncake: {error}: use pip to install mooncake-transfer-engine-non-cuda, which wants "
            "libibverbs, librdmacm and libnl-3 of the system, or auto, shm or tcp"
        ) from error
    try:
        return Mooncake(_address(options.host), shapes, memory, regions)
    except OSError as error:
        raise ConfigError(f"{_FLAG} mooncake: {error}: its own lines above say why; or use auto, shm or tcp") from error


def _address(host: str) -> str:
    """By which peers find this machine."""
    try:
        is_all = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_all = False
    return socket.gethostbyname(socket.gethostname()) if is_all else host


_BY_LIBRARY: Final = {"nixl": _nixl, "mooncake": _mooncake}


def memory_of(cache: CachePool, shapes: Mapping[str, KindShape]) -> Memory:
    if any(tensor.is_cuda for table in cache.tables.values() for tensor in table.tensors):
        from forebay.transfer.wire.memory import DeviceMemory

        return DeviceMemory(cache, shapes)
    return HostMemory.of(cache, shapes)


def _check(options: DisaggregationOptions, place: Place | None) -> None:
    backend = options.transfer_backend
    if backend is TransferBackend.SHM and options.is_decode and place is None:
        raise ConfigError(
            f"{_FLAG} shm: the cache is not in memory that other processes can map (a CPU's, "
            "under Linux): use auto or tcp"
        )
    if options.chaos != Chaos() and not is_loopback(options.host):
        raise ConfigError(f"--chaos with servers on {options.host}: faults on purpose are for one machine")
    if options.is_prefill and not options.cluster_key and not is_loopback(options.host):
        raise ConfigError(
            f"prefill would listen on {options.host} for whoever asks: give it and decode the same --cluster-key-file"
        )
