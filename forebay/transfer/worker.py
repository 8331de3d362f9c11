"""`Transfers` between processes: one thread owns control connections and tickets, another moves bytes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.clock import TICK_S
from forebay.base.errors import ConfigError, EngineError
from forebay.base.exposure import is_loopback
from forebay.config.engine_config import Chaos, DisaggregationOptions, EngineConfig, TransferBackend
from forebay.pools.cache_pool import CachePool
from forebay.pools.table import Region
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Decline, Event, Offer, Order, Send, Span, Withdraw
from forebay.transfer.pattern import Pattern
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import LocalEngine, Loop
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.decode import DecodeStage
from forebay.transfer.session.layout import layout_of, weights_digest
from forebay.transfer.session.prefill import PrefillStage
from forebay.transfer.wire.frames import Layout
from forebay.transfer.wire.memory import HostMemory, Memory, OneSided, chunk_bytes, shapes_of
from forebay.transfer.wire.shm import Place, Shm, machine

TICKS_PER_BEAT: Final = 4
BACKLOG: Final = 64

_FLAG: Final = "--disaggregation-transfer-backend"
_SHARING: Final = sys.platform == "linux"


class Worker:
    """One engine's half of transfers. `instance` is what its tickets name as the peer; `port` is where prefill listens,
    0 on decode. `fileno` is readable while there are events."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self.instance, options = engine, engine.instance, engine.options
        self._listener = _listen(options) if options.is_prefill else None
        self._loop = Loop(engine)
        self._data_thread = DataThread(engine.memory, chunk_bytes(engine.shapes), self._report)
        self._stage: DecodeStage | PrefillStage
        if self._listener is not None:
            self._stage = PrefillStage(engine, self._loop, self._data_thread, self._listener)
        else:
            self._stage = DecodeStage(engine, self._loop, self._data_thread)
        self.port: int = 0 if self._listener is None else self._listener.getsockname()[1]
        self._period_s = min(TICK_S, options.heartbeat_s / TICKS_PER_BEAT)
        self._loop.start(self._stage.tick, self._period_s)

    def submit(self, order: Order) -> None:
        nonce = order.ticket.nonce if isinstance(order, Offer | Decline | Send | Withdraw) else None
        self._loop.call(partial(self._handle, order, nonce))

    def poll(self) -> Sequence[Event]:
        if not (self._loop.is_alive and self._data_thread.is_alive):
            raise EngineError("the threads that move caches have ended; the log says why", code="transfers_ended")
        return self._loop.events.take()

    def fileno(self) -> int:
        return self._loop.events.fileno()

    def weights_changed(self, path: str | None, version: int) -> None:
        """Sessions end: in the next ones layouts are compared anew."""
        layout = self._engine.layout
        weights = layout.weights if path is None else weights_digest(Path(path))
        layout = msgspec.structs.replace(layout, weights=weights, weight_version=version)

        def renew() -> None:
            self._engine.layout = layout
            self._stage.end_sessions("its weights have changed")

        self._loop.call(renew)

    def pattern(self, spans: Mapping[str, Span], num_tokens: int) -> Pattern:
        """Through places that the caller has, and nobody else."""
        return Pattern(self._engine.shapes, self._engine.memory, self.layout.columns, spans, num_tokens)

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def token_bytes(self) -> int:
        """Bytes that pages have of a token."""
        return sum(sum(shape.bytes_per_place) for shape in self._engine.shapes.values() if shape.by_token)

    def transport(self, host: str, port: int) -> str:
        """By what caches come from there just now; nothing where there is no session."""
        return self._stage.transport((host, port))

    @property
    def num_rejected(self) -> int:
        """Sessions that ended because a peer's message could not be handled."""
        return self._loop.guard.num_rejected

    @property
    def num_unfenced(self) -> int:
        """Broken tickets whose places a peer may still write to."""
        return self._stage.num_unfenced

    def close(self) -> None:
        """End all connections; what was under way breaks on the other side. Events that were not taken are lost."""
        self._loop.end()
        self._stage.close()
        self._data_thread.close()
        if self._listener is not None:
            self._listener.close()
        self._loop.close()

    def _report(self, report: data_thread.Report) -> None:
        """Take a report of the data thread, on that thread."""
        nonce = None
        if not isinstance(report, data_thread.Lost):
            nonce = report.chunk.nonce if isinstance(report, data_thread.Wrote) else report.nonce
        self._loop.call(partial(self._handle, report, nonce))

    def _handle(self, what: Order | data_thread.Report, nonce: bytes | None) -> None:
        """Have the role handle an order or a report, on the loop's thread, until the loop is closed. An exception ends
        the session of the ticket with this `nonce`."""
        if self._loop.is_closed:
            return
        if nonce is None:
            self._stage.handle(what)
        else:
            handle, lose = partial(self._stage.handle, what), partial(self._stage.lose_ticket, nonce)
            self._loop.guard.run("a ticket's peer", handle, lose)


def _listen(options: DisaggregationOptions) -> socket.socket:
    listener = socket.create_server((options.host, options.bootstrap_port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener


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
        timeout_s, chaos = options.bootstrap_timeout_s, options.chaos
        one_sided["shm"] = Shm(shapes, memory, regions, place, timeout_s=timeout_s, chaos=chaos)
    for name, make in _BY_LIBRARY.items():
        if name in transports:
            if not isinstance(memory, HostMemory):
                raise ConfigError(f"{_FLAG} {name} with a cache on a GPU: not in this version: use tcp")
            one_sided[name] = make(options, instance, shapes, memory, regions)
    engine = LocalEngine(
        options=options,
        instance=instance,
        layout=layout,
        shapes=shapes,
        memory=memory,
        transports=transports,
        one_sided=one_sided,
        machine=machine() if _SHARING else "",
    )
    return Worker(engine)


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
