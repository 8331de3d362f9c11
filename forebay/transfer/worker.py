"""`Transfers` between processes: one thread that owns control connections and tickets, another that moves bytes.

The first never waits for bytes, so that heartbeats go out and orders are taken whatever is being copied.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.clock import TICK_S, RunClock
from forebay.base.errors import EngineError
from forebay.base.log import event, get_logger
from forebay.base.wake import Wake
from forebay.config.engine_config import DisaggregationOptions
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Decline, Event, Offer, Order, Rest, Send, Span, Withdraw
from forebay.transfer.pattern import Pattern
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import Connection
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.decode import DecodeStage
from forebay.transfer.session.desk import ConnectionUser, Desk
from forebay.transfer.session.layout import weights_digest
from forebay.transfer.session.prefill import PrefillStage
from forebay.transfer.wire.frames import Layout
from forebay.transfer.wire.memory import Memory, OneSided, chunk_bytes

TICKS_PER_BEAT: Final = 4
BACKLOG: Final = 64
HOLD_S: Final = 0.005  # between two looks at frames that are held up on purpose

log = get_logger("transfer")


class Worker:
    """One engine's half of transfers. `instance` is what its tickets name as the peer; `port` is where prefill listens,
    0 on decode. `token_bytes` are what pages have of a token. `fileno` is readable while there is news."""

    _ending = _is_closed = False

    def __init__(
        self,
        options: DisaggregationOptions,
        *,
        instance: str,
        layout: Layout,
        shapes: dict[str, KindShape],
        memory: Memory,
        transports: list[str],
        one_sided: dict[str, OneSided],
        machine: str,
    ) -> None:
        self.instance = instance
        self._orders: deque[Order | data_thread.Report | Callable[[], None]] = deque()
        self._events: deque[Event] = deque()
        self._oldest_event: float | None = None
        self._wake, self._news, self._clock = Wake(), Wake(), RunClock()
        self._period_s = min(TICK_S, options.heartbeat_s / TICKS_PER_BEAT)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._users: dict[Connection, ConnectionUser] = {}
        self._data_thread = DataThread(memory, chunk_bytes(shapes), self._put)
        self._desk = desk = Desk(
            options=options,
            instance=instance,
            layout=layout,
            shapes=shapes,
            memory=memory,
            chunk_bytes=chunk_bytes(shapes),
            transports=transports,
            one_sided=one_sided,
            machine=machine,
            clock=self._clock,
            data_thread=self._data_thread,
            emit=self._emit,
            call=self._put,
            watch=self._watch,
            unwatch=self._unwatch,
            untaken_s=self._untaken_s,
        )
        self._listener = self._listen(options) if options.is_prefill else None
        self._side = DecodeStage(desk) if self._listener is None else PrefillStage(desk, self._listener)
        self.port: int = 0 if self._listener is None else self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def _listen(self, options: DisaggregationOptions) -> socket.socket:
        listener = socket.create_server((options.host, options.bootstrap_port), backlog=BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        self._put(order)

    def poll(self) -> Sequence[Event]:
        if not (self._thread.is_alive() and self._data_thread.is_alive):
            raise EngineError("the threads that move caches have ended; the log says why", code="transfers_ended")
        self._news.clear()
        self._oldest_event = None
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def fileno(self) -> int:
        return self._news.fileno()

    def weights_changed(self, path: str | None, version: int) -> None:
        """Sessions end: in the next ones layouts are compared anew."""
        layout = self._desk.layout
        weights = layout.weights if path is None else weights_digest(Path(path))
        layout = msgspec.structs.replace(layout, weights=weights, weight_version=version)

        def renew() -> None:
            self._desk.layout = layout
            self._side.end_sessions("its weights have changed")

        self._put(renew)

    def pattern(self, spans: Mapping[str, Span], num_tokens: int) -> Pattern:
        """Through places that the caller has, and nobody else."""
        return Pattern(self._desk.shapes, self._desk.memory, self.layout.columns, spans, num_tokens)

    @property
    def layout(self) -> Layout:
        return self._desk.layout

    @property
    def token_bytes(self) -> int:
        return sum(sum(shape.bytes_per_place) for shape in self._desk.shapes.values() if shape.by_token)

    def transport(self, host: str, port: int) -> str:
        """By what caches come from there just now; nothing where there is no session."""
        return self._side.transport((host, port)) if isinstance(self._side, DecodeStage) else ""

    @property
    def num_rejected(self) -> int:
        """Sessions that ended because a peer's message could not be handled."""
        return self._desk.guard.num_rejected

    @property
    def num_unfenced(self) -> int:
        """Broken tickets whose places a peer may still write to."""
        return self._side.num_unfenced if isinstance(self._side, DecodeStage) else 0

    def close(self) -> None:
        """End all connections; what was under way breaks on the other side. News that were not taken are lost."""
        self._ending = True
        self._wake.set()
        self._thread.join()
        self._side.close()
        self._data_thread.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        for wake in (self._wake, self._news):
            wake.close()
        self._is_closed = True
        self._end_what_came_late()

    # -- the worker's thread ---------------------------------------------------------------------------------------

    def _put(self, what: Order | data_thread.Report | Callable[[], None]) -> None:
        """From any thread."""
        self._orders.append(what)
        self._wake.set()
        if self._is_closed:
            self._end_what_came_late()

    def _end_what_came_late(self) -> None:
        """Finish work that was done beside the worker: its owner is gone, and closes the result."""
        while self._orders:
            with suppress(IndexError):  # another thread was first
                what = self._orders.popleft()
                if callable(what):
                    what()

    def _emit(self, what: Event) -> None:
        self._events.append(what)
        if self._oldest_event is None:
            self._oldest_event = self._clock()
        self._news.set()

    def _untaken_s(self) -> float:
        since = self._oldest_event
        return 0.0 if since is None else self._clock() - since

    def _watch(self, link: Connection, user: ConnectionUser) -> None:
        self._users[link] = user
        self._selector.register(link, selectors.EVENT_READ, link)

    def _unwatch(self, link: Connection) -> None:
        if self._users.pop(link, None) is not None:
            self._selector.unregister(link)

    def _run(self) -> None:
        try:
            next_tick = 0.0
            while not self._ending:
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + self._period_s
                    self._clock.tick()
                    self._side.tick()
                held_back = any(link.holds_back for link in self._users)
                if held_back:
                    self._flush()
                self._turn(HOLD_S if held_back else max(0.0, next_tick - time.monotonic()))
        except Exception:
            log.exception(event("transfers_ended"))
            self._news.set()

    def _turn(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            if key.data is not None:
                self._serve(key.data, mask)
            elif key.fileobj is self._listener and isinstance(self._side, PrefillStage):
                self._side.accept()
        self._wake.clear()
        while self._orders:
            self._do(self._orders.popleft())
        for link in self._users:
            self._selector.modify(
                link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0), link
            )

    def _serve(self, link: Connection, mask: int) -> None:
        user = self._users.get(link)
        if user is not None:
            self._desk.guard.run(link.where, partial(self._talk, link, user, mask), partial(user.on_lost, link))

    def _talk(self, link: Connection, user: ConnectionUser, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if mask & selectors.EVENT_READ:
            for frame in link.receive():
                self._desk.bounds.check(frame)
                user.on_frame(link, frame)
                if link not in self._users:
                    return

    def _flush(self) -> None:
        """Send the frames that were held back."""
        for link, user in [*self._users.items()]:
            self._desk.guard.run(link.where, link.flush, partial(user.on_lost, link))

    def _do(self, what: Order | data_thread.Report | Callable[[], None]) -> None:
        """Carry out one order or take one report. An exception ends the session of its ticket."""
        nonce = _nonce_of(what)
        if nonce is None:
            self._carry_out(what)
        else:
            self._desk.guard.run(
                "a ticket's peer", partial(self._carry_out, what), partial(self._side.lose_ticket, nonce)
            )

    def _carry_out(self, what: Order | data_thread.Report | Callable[[], None]) -> None:
        side = self._side
        match what:
            case Offer() if isinstance(side, DecodeStage):
                side.offer(what)
            case Decline() if isinstance(side, DecodeStage):
                side.decline(what)
            case Send() if isinstance(side, PrefillStage):
                side.send(what)
            case Rest() if isinstance(side, PrefillStage):
                side.rest(what)
            case Withdraw():
                side.withdraw(what)
            case data_thread.Wrote() if isinstance(side, PrefillStage):
                side.on_wrote(what)
            case data_thread.Landed() if isinstance(side, DecodeStage):
                side.on_landed(what)
            case data_thread.Failed() if isinstance(side, DecodeStage):
                side.on_failed(what)
            case data_thread.Dropped():
                side.on_dropped(what)
            case data_thread.Lost():
                side.on_mover_lost(what)
            case _ if callable(what):
                what()
            case _:
                raise AssertionError(f"{type(side).__name__} was given {what!r}")


def _nonce_of(what: Order | data_thread.Report | Callable[[], None]) -> bytes | None:
    """Return the ticket's nonce; None for what is of no single ticket."""
    match what:
        case Offer() | Decline() | Send() | Withdraw():
            return what.ticket.nonce
        case data_thread.Wrote():
            return what.chunk.nonce
        case data_thread.Landed() | data_thread.Failed() | data_thread.Dropped():
            return what.nonce
        case _:
            return None
