"""Chunks by Mooncake's transfer engine: one-sided writes, by RDMA if the machine has it, else by TCP.

A write that it reports as done is complete on the other side. A write that it reports as failed may still arrive: the
ticket of such a chunk stays open for good. Its port has no key, and every process that reaches it can write to the
registered memory, so it is only for networks that are yours alone.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any, Final

from forebay.base.log import event, get_logger
from forebay.requests.pieces import Chunk
from forebay.transfer.wire.by_address import (
    LibraryTransport,
    OneSidedByAddress,
    Stretches,
    WriterByAddress,
    not_installed,
    not_started,
)
from forebay.transfer.wire.memory import Endpoint, Place

try:
    from mooncake.engine import TransferEngine
except ImportError as error:
    packages = "mooncake-transfer-engine-non-cuda, which wants libibverbs, librdmacm and libnl-3 of the system"
    raise not_installed("mooncake", error, packages) from error

_METADATA: Final = "P2PHANDSHAKE"  # engines ask each other, no server
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_REFUSED: Final = (-1, 2**64 - 1)  # as a batch's number
_DONE, _FAILED = 1, -1  # else it goes on

log = get_logger("transfer")


class MooncakeWriter(WriterByAddress):
    """Writes chunks by Mooncake, a write for each stretch."""

    _writes: list[int]  # that go on

    def _write(self, stretches: Stretches) -> None:
        """Submit one write for each run: for a batch with a failed write, Mooncake does not report when the last one
        ends."""
        self._writes = []
        for ours, theirs, length in zip(*(column.tolist() for column in stretches), strict=True):
            write = self._library.transfer_submit_write(self._peer, ours, theirs, length)
            if write in _REFUSED:
                self.is_lost = bool(self._writes)
                raise OSError(f"Mooncake does not reach {self._peer}")
            self._writes.append(write)

    def advance(self) -> Chunk | None:
        left = []
        for write in self._writes:
            status = self._library.transfer_check_status(write)
            if status == _FAILED:
                self.is_lost = True
            elif status != _DONE:
                left.append(write)
        self._writes = left
        if self.is_lost:
            raise OSError(f"Mooncake failed to write to {self._peer}")
        return None if left else self._chunk


class Mooncake(OneSidedByAddress):
    """One engine for all peers, which find it at the host that is its name."""

    writer = MooncakeWriter

    def _start(self, name: str) -> object:
        engine: Any = TransferEngine()
        protocol = "rdma" if _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()) else "tcp"
        _check("start", engine.initialize(name, _METADATA, protocol, ""))
        begins, lengths = zip(*((begin, num_bytes) for _, begin, num_bytes in self._regions), strict=True)
        _check("register the caches", engine.batch_register_memory([*begins], [*lengths]))
        self._name = f"{name}:{engine.get_rpc_port()}"
        log.info(event("mooncake", at=self._name, protocol=protocol, effect="whoever reaches its port can write here"))
        return engine

    def _end(self) -> bytes:
        return self._name.encode()

    def _meet(self, end: bytes) -> str:
        peer = end.decode()
        _check(f"reach {peer}", self._library.send_probe(peer))
        return peer


def _check(what: str, code: int) -> None:
    if code:
        raise OSError(f"Mooncake cannot {what}: error {code}")


def _address(host: str) -> str:
    """Return the address by which peers find this machine."""
    try:
        is_all = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_all = False
    return socket.gethostbyname(socket.gethostname()) if is_all else host


class _Mooncake(LibraryTransport):
    def open(self, endpoint: Endpoint, place: Place | None) -> Mooncake:
        try:
            return Mooncake(_address(endpoint.options.host), endpoint)
        except OSError as error:
            raise not_started("mooncake", error) from error


TRANSPORT: Final = _Mooncake()
