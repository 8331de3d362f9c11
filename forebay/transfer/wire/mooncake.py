"""Chunks by Mooncake's transfer engine: one-sided writes, by RDMA where the machine has it, else by TCP.

What it calls done has been written on the other side. Of what it calls failed nobody knows whether some of it still
comes: such a chunk's ticket stays open for good. Its port has no key: whoever reaches it can write to what is
registered, so it is for networks that are yours alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from mooncake.engine import TransferEngine

from forebay.base.log import event, get_logger
from forebay.pools.table import Region
from forebay.requests.pieces import Chunk, KindShape
from forebay.transfer.wire.by_address import ReachByAddress, Stretches, Told, WriterByAddress, shapes_there, told
from forebay.transfer.wire.memory import HostMemory

_METADATA: Final = "P2PHANDSHAKE"  # engines ask each other, no server
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_REFUSED: Final = (-1, 2**64 - 1)  # as a batch's number
_DONE, _FAILED = 1, -1  # else it goes on

log = get_logger("transfer")


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
        both = self._regions, invitation.regions
        return MooncakeWriter(self._engine, invitation.name, self._memory, self._shapes, *both), theirs


class MooncakeWriter(WriterByAddress):
    _writes: list[int]  # that go on

    def _write(self, stretches: Stretches) -> None:
        """One for each: of a batch nobody is told when the last of it is over, if one fails."""
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


def _check(what: str, code: int) -> None:
    if code:
        raise OSError(f"Mooncake cannot {what}: error {code}")
