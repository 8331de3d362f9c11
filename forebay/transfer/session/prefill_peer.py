"""Decode's end of a session with a prefill server: from connecting until offers can be made, and until it is over."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from forebay.base.errors import WireError
from forebay.base.log import event, get_logger
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import Connection, ConnectionLost
from forebay.transfer.session.desk import Desk
from forebay.transfer.session.layout import mismatch
from forebay.transfer.wire import frames
from forebay.transfer.wire.frames import NONCE_BYTES, PROTOCOL
from forebay.transfer.wire.memory import Reach
from forebay.transfer.wire.tcp import TcpReader, tune

Address = tuple[str, int]

log = get_logger("transfer")


class SessionUser(Protocol):
    """Receiver of a session's events, called by the worker's thread."""

    def on_joined(self, session: Session) -> None: ...

    def on_session_frame(self, session: Session, frame: object) -> None: ...

    def on_session_refused(self, session: Session, failure: Failure) -> None:
        """The two do not fit together, nor would they in the next session. It is lost next; frames still go out."""
        ...

    def on_session_lost(self, session: Session, failure: Failure) -> None: ...


class Session:
    """Begins at once; ends with `on_session_lost`. `epoch` is the mover's name for it, too. `reach` is what the peer
    was let into, where it writes here by itself."""

    def __init__(self, desk: Desk, address: Address, epoch: int, user: SessionUser) -> None:
        self._desk, self._user, self.address, self.epoch = desk, user, address, epoch
        self.where = f"prefill server {address[0]}:{address[1]}"
        self.is_joined, self._is_over = False, False
        self.instance = ""  # the process that answered
        self.transport = ""  # that it chose
        self.reach: Reach | None = None
        self._since = self._beat_at = desk.clock()
        self._links: list[Connection] = []  # the control connection; that of chunks until the mover has it
        self._hellos = [self._hello(data=False), self._hello(data=True)]
        self._connect(address)

    def _hello(self, *, data: bool) -> frames.Hello:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return frames.Hello(protocol=PROTOCOL, instance=self._desk.instance, epoch=self.epoch, nonce=nonce, data=data)

    # -- connections -----------------------------------------------------------------------------------------------

    def _connect(self, address: Address) -> None:
        timeout_s = self._desk.options.bootstrap_timeout_s

        def connect() -> Callable[[], None]:
            sock = socket.create_connection(address, timeout=timeout_s)
            return lambda: self._connected(sock)

        self._desk.beside(self.where, connect, self.lose)

    def _connected(self, sock: socket.socket) -> None:
        if self._is_over:
            sock.close()
            return
        desk = self._desk
        link = Connection(sock, self.where, desk.clock, desk.options.chaos)
        hello = self._hellos[len(self._links)]
        self._links.append(link)
        desk.watch(link, self)
        self._try(lambda: tune(sock))
        self._try(lambda: link.greet(desk.options.cluster_key, hello))

    def on_frame(self, link: Connection, frame: object) -> None:
        control = self._links[0]
        match frame:
            case frames.Challenge() if frame.protocol != PROTOCOL:
                difference = f"protocol: prefill speaks {frame.protocol}, decode {PROTOCOL}"
                self._part(frames.layout_mismatch(difference))
            case frames.Challenge() if link is control:
                self.instance = frame.instance
                link.enter(self._desk.options.cluster_key, self._hellos[0], frame)
                desk = self._desk
                self.send(frames.Introduce(layout=desk.layout, transports=desk.transports, machine=desk.machine))
            case frames.Challenge():
                link.enter(self._desk.options.cluster_key, self._hellos[1], frame)
                self._attach(link)
            case frames.Welcome():
                self._welcome(frame)
            case frames.Refused(failure):
                self._part(failure)
            case frames.Joined():
                self.is_joined = True
                link.joined()
                self._user.on_joined(self)
            case _:
                self._user.on_session_frame(self, frame)

    def _welcome(self, frame: frames.Welcome) -> None:
        desk = self._desk
        difference = mismatch(frame.layout, desk.layout)
        if difference or frame.transport not in desk.transports:
            why = difference or f"prefill chose transport {frame.transport!r}, decode has {desk.transports}"
            self._part(frames.layout_mismatch(why))
            return
        self.transport = frame.transport
        if frame.transport == "tcp":
            self._connect(self._links[0].sock.getpeername()[:2])
        else:
            self.reach = desk.one_sided[frame.transport].reach(frame.pid if frame.machine == desk.machine else 0)
            self.send(frames.Invite(self.reach.invitation))

    def _attach(self, link: Connection) -> None:
        self._try(lambda: link.send(frames.Attach()))
        self._desk.unwatch(link)
        self._links.remove(link)
        reader = TcpReader(link.sock, link.decoder, self._desk.staging())
        self._desk.data_thread.submit(data_thread.AddReader(self.epoch, reader))

    # -- frames and time -------------------------------------------------------------------------------------------

    def send(self, frame: msgspec.Struct) -> None:
        self._try(lambda: self._links[0].send(frame))

    def _try(self, send: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            send()
        except (ConnectionLost, WireError, OSError) as error:
            failure = frames.peer_lost(self.where, str(error))
            self._desk.call(lambda: self.lose(failure))  # not now: the caller is about to do more with this session

    def tick(self, now: float) -> None:
        options, silence_s = self._desk.options, self._desk.silence_s
        if not self.is_joined:
            if now - self._since > options.bootstrap_timeout_s:
                self.lose(frames.bootstrap_timeout(self.where, options.bootstrap_timeout_s))
            return
        if now - self._beat_at >= options.heartbeat_s:
            self._beat_at = now
            self.send(frames.Beat())
        if now - self._links[0].heard > silence_s:
            self.lose(frames.heartbeat_timeout(self.where, silence_s))

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_lost(self, link: Connection, failure: Failure) -> None:
        self.lose(failure)

    def _part(self, failure: Failure) -> None:
        self._user.on_session_refused(self, failure)
        self.lose(failure)

    def lose(self, failure: Failure) -> None:
        """Once. What the mover still reads of it is of no ticket then."""
        if self._is_over:
            return
        self._is_over = True
        if self._links:
            log.warning(event("prefill_lost", where=self.where, code=failure.code, why=failure.message))
        for link in self._links:
            self._desk.unwatch(link)
            link.close()
        self._desk.data_thread.submit(data_thread.EndSession(self.epoch))
        if self.reach is not None:
            self.reach.close()
        self.is_joined = False
        self._user.on_session_lost(self, failure)
