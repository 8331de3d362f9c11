"""Chunks by Mooncake's transfer engine: one-sided writes, by RDMA where the machine has it, else by TCP.

What it calls done has been written on the other side. Of what it calls failed nobody knows whether some of it still
comes: such a chunk's ticket stays open for good. Its port has no key: whoever reaches it can write to what is
registered, so it is for networks that are yours alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from mooncake.engine import TransferEngine

from forebay.base.log import event, get_logger
from forebay.disagg.addresses import Addresses, ReachByAddress, Told, addresses, shapes_there, stretches, told
from forebay.disagg.frames import Chunk
from forebay.disagg.memory import HostMemory, chunk_bytes
from forebay.disagg.pages import KindShape, Piece
from forebay.disagg.tcp import chunk_of
from forebay.pools.table import Region
from forebay.requests.parts import I64

_METADATA: Final = "P2PHANDSHAKE"  # engines ask each other, no server
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_REFUSED: Final = (-1, 2**64 - 1)  # as a batch's number
_DONE, _FAILED = 1, -1  # else it goes on
_POLL_S: Final = 0.001

log = get_logger("disagg")


class _Invitation(msgspec.Struct, frozen=True, array_like=True):
    name: str
    regions: Told


class Mooncake:
    """One engine for all peers, which find it at `host`; the caches are registered with it as long as it lives.
    OSError where it does not start."""

    def __init__(self, host: str, shapes: dict[str, KindShape], memory: HostMemory, regions: Sequence[Region]) -> None:
        self._shapes, self._memory, self._regions = shapes, memory, told(regions)
        self._engine: Any = TransferEngine()
        protocol = "rdma" if _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()) else "tcp"
        _check("start", self._engine.initialize(host, _METADATA, protocol, ""))
        begins, lengths = zip(*((begin, num_bytes) for _, begin, num_bytes in self._regions), strict=True)
        _check("register the caches", self._engine.batch_register_memory([*begins], [*lengths]))
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        log.info(event("mooncake", at=self._name, protocol=protocol, effect="whoever reaches its port can write here"))

    def reach(self, pid: int) -> ReachByAddress:
        return ReachByAddress(msgspec.msgpack.encode(_Invitation(self._name, self._regions)), pid)

    def join(self, address: bytes, page_size: int) -> tuple[MooncakeWriter, dict[str, KindShape]]:
        invitation = msgspec.msgpack.decode(address, type=_Invitation)
        theirs = shapes_there(invitation.regions, self._shapes, page_size)
        _check(f"reach {invitation.name}", self._engine.send_probe(invitation.name))
        both = addresses(self._regions), addresses(invitation.regions)
        return MooncakeWriter(self._engine, invitation.name, self._memory, self._shapes, *both), theirs


class MooncakeWriter:
    holds_places = True
    closes_at_once = False

    def __init__(
        self,
        engine: Any,
        peer: str,
        memory: HostMemory,
        shapes: Mapping[str, KindShape],
        ours: Addresses,
        theirs: Addresses,
    ) -> None:
        self._engine, self._peer, self._memory, self._shapes = engine, peer, memory, shapes
        self._ours, self._theirs = ours, theirs
        self._staging = memory.staging(chunk_bytes(shapes))
        self._writes: list[int] = []  # that go on
        self._chunk: Chunk | None = None
        self.is_lost = False

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        """A write for each stretch: of a batch nobody is told when the last of it is over, if one fails."""
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), self._memory.sum(piece, self._staging))
        found = stretches(piece, places, self._shapes, self._ours, self._theirs)
        for ours, theirs, length in zip(*(column.tolist() for column in found), strict=True):
            write = self._engine.transfer_submit_write(self._peer, ours, theirs, length)
            if write in _REFUSED:
                self.is_lost = bool(self._writes)
                raise OSError(f"Mooncake does not reach {self._peer}")
            self._writes.append(write)

    def advance(self) -> Chunk | None:
        left = []
        for write in self._writes:
            status = self._engine.transfer_check_status(write)
            if status == _FAILED:
                self.is_lost = True
            elif status != _DONE:
                left.append(write)
        self._writes = left
        if self.is_lost:
            raise OSError(f"Mooncake failed to write to {self._peer}")
        return None if left else self._chunk

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Where a write is under way, waits for it: there is no other way to know that it is over."""
        while self._writes and not self.is_lost and self.advance() is None:
            time.sleep(_POLL_S)


def _check(what: str, code: int) -> None:
    if code:
        raise OSError(f"Mooncake cannot {what}: error {code}")
