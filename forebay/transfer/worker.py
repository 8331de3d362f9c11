"""`Transfers` between processes: one thread owns control connections and tickets, another moves bytes."""

from __future__ import annotations

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
from forebay.config.engine_config import Chaos, DisaggregationOptions, EngineConfig
from forebay.formats.identity import weights_digest
from forebay.memory.kv_allocator import KV
from forebay.pools.cache_pool import CachePool
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Decline, Event, Offer, Order, Send, Span, Withdraw
from forebay.transfer.pattern import Pattern
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import LocalEngine, Loop
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.decode import DecodeStage
from forebay.transfer.session.layout import layout_of
from forebay.transfer.session.prefill import PrefillStage
from forebay.transfer.transports import open_transports
from forebay.transfer.wire.frames import Layout
from forebay.transfer.wire.machine import gpu_of, machine
from forebay.transfer.wire.memory import DeviceMemory, Endpoint, HostMemory, Memory, Place, chunk_bytes, shapes_of

TICKS_PER_BEAT: Final = 4
BACKLOG: Final = 64


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
        """Carry out an order on the thread of sessions; from any thread."""
        if isinstance(order, Offer | Send):
            order = msgspec.structs.replace(order, spans=self._kept(order.spans))
        nonce = order.ticket.nonce if isinstance(order, Offer | Decline | Send | Withdraw) else None
        self._loop.call(partial(self._handle, order, nonce))

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call, oldest first. Raises EngineError if a thread has ended."""
        if not (self._loop.is_alive and self._data_thread.is_alive):
            raise EngineError("the threads that move caches have ended; the log says why", code="transfers_ended")
        return self._loop.events.take()

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are events."""
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
        """Return a pattern through places that only the caller uses."""
        return Pattern(self._engine.shapes, self._engine.memory, self.layout.columns, self._kept(spans), num_tokens)

    def _kept(self, spans: Mapping[str, Span]) -> dict[str, Span]:
        """Return the places without pages of KV if the model keeps no KV: a sequence has pages all the same."""
        return {kind: span for kind, span in spans.items() if kind != KV or KV in self._engine.shapes}

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def token_bytes(self) -> int:
        """Bytes that pages have of a token."""
        return sum(sum(shape.bytes_per_place) for shape in self._engine.shapes.values() if shape.by_token)

    def transport(self, host: str, port: int) -> str:
        """Return the transport by which caches arrive from this address; empty if there is no session."""
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
        """End all connections; transfers under way break on the other side. Events that were not taken are lost."""
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
    `kernels` names the variant that computes; `place` returns the location of the cache's addresses for other processes
    (`Regions.place`), None if they cannot map it. `close` ends it.

    Raises ConfigError for a configuration that cannot work, OSError if the port is in use.
    """
    layout = layout_of(cache, config, vocab_size=vocab_size, kernels=kernels)
    return transfers_of(config.disaggregation, cache, layout, place)


def transfers_of(options: DisaggregationOptions, cache: CachePool, layout: Layout, place: Place | None) -> Worker:
    """Return the component for a cache of this layout; see `make_transfers`."""
    _check(options)
    shapes = shapes_of(cache)
    endpoint = Endpoint(
        options=options,
        instance=secrets.token_hex(16),
        shapes=shapes,
        memory=memory_of(cache, shapes),
        regions=[region for kind in shapes for region in cache.mover.regions(kind)],
    )
    opened = open_transports(endpoint, place)
    engine = LocalEngine(
        options=options,
        instance=endpoint.instance,
        layout=layout,
        shapes=shapes,
        memory=endpoint.memory,
        transports=[*opened],
        one_sided={name: end for name, end in opened.items() if end is not None},
        machine=machine(gpu=gpu_of(cache.mover.device)) if sys.platform == "linux" else "",
    )
    return Worker(engine)


def memory_of(cache: CachePool, shapes: Mapping[str, KindShape]) -> Memory:
    """Return the memory of a cache, on the host or on a GPU."""
    if cache.mover.device.type == "cuda":
        return DeviceMemory.of(cache, shapes)
    return HostMemory.of(cache, shapes)


def _check(options: DisaggregationOptions) -> None:
    if options.chaos != Chaos() and not is_loopback(options.host):
        raise ConfigError(f"--chaos with servers on {options.host}: faults on purpose are for one machine")
    if options.is_prefill and not options.cluster_key and not is_loopback(options.host):
        raise ConfigError(
            f"prefill would accept every peer on {options.host}: give it and decode the same --cluster-key-file"
        )
