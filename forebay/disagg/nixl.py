"""Chunks by NIXL: one-sided writes by whatever UCX finds between the two engines, from RDMA to shared memory.

Runs of places that are neighbours on both sides are one descriptor. A write that is under way cannot be taken back, so
a ticket whose chunk it is stays open until it has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from nixl_cu12 import _bindings
from nixl_cu12._api import nixl_agent, nixl_agent_config

from forebay.disagg.addresses import Addresses, ReachByAddress, Told, addresses, shapes_there, stretches, told
from forebay.disagg.frames import Chunk
from forebay.disagg.memory import HostMemory, chunk_bytes
from forebay.disagg.pages import KindShape, Piece
from forebay.disagg.tcp import chunk_of
from forebay.pools.table import Region
from forebay.requests.parts import I64

_KIND_OF_MEMORY: Final = "DRAM"
_DEVICE: Final = 0
_POLL_S: Final = 0.001


_ERRORS: Final = tuple(vars(_bindings)[name] for name in dir(_bindings) if name.endswith("Error"))  # no common base


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise OSError(f"NIXL: {type(error).__name__}: {error}") from error


class _Invitation(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes
    regions: Told


class Nixl:
    """One agent for all peers; the caches are registered with it as long as it lives."""

    def __init__(
        self, instance: str, shapes: dict[str, KindShape], memory: HostMemory, regions: Sequence[Region]
    ) -> None:
        self._shapes, self._memory, self._regions = shapes, memory, regions
        self._agent: Any = nixl_agent(instance, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory(
            [(region.address, region.num_bytes, _DEVICE, "") for region in regions], _KIND_OF_MEMORY
        )

    def reach(self, pid: int) -> ReachByAddress:
        invitation = _Invitation(self._agent.get_agent_metadata(), told(self._regions))
        return ReachByAddress(msgspec.msgpack.encode(invitation), pid)

    def join(self, address: bytes, page_size: int) -> tuple[NixlWriter, dict[str, KindShape]]:
        invitation = msgspec.msgpack.decode(address, type=_Invitation)
        theirs = shapes_there(invitation.regions, self._shapes, page_size)
        with _as_os_errors():
            peer = self._agent.add_remote_agent(invitation.agent)
        both = addresses(told(self._regions)), addresses(invitation.regions)
        return NixlWriter(self._agent, peer, self._memory, self._shapes, *both), theirs


class NixlWriter:
    holds_places = True
    closes_at_once = False
    is_lost = False

    def __init__(
        self,
        agent: Any,
        peer: str,
        memory: HostMemory,
        shapes: Mapping[str, KindShape],
        ours: Addresses,
        theirs: Addresses,
    ) -> None:
        self._agent, self._peer, self._memory, self._shapes = agent, peer, memory, shapes
        self._ours, self._theirs = ours, theirs
        self._staging = memory.staging(chunk_bytes(shapes))
        self._handle: Any = None
        self._chunk: Chunk | None = None

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        ours, theirs, lengths = stretches(piece, places, self._shapes, self._ours, self._theirs)
        devices = np.full_like(lengths, _DEVICE)
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), self._memory.sum(piece, self._staging))
        with _as_os_errors():
            both = [
                self._agent.get_xfer_descs(
                    np.stack([begins, lengths, devices], axis=1).astype(np.uint64), _KIND_OF_MEMORY
                )
                for begins in (ours, theirs)
            ]
            self._handle = self._agent.initialize_xfer("WRITE", *both, self._peer)
            self._agent.transfer(self._handle)  # what comes of it, `advance` asks

    def advance(self) -> Chunk | None:
        if self._handle is None:
            raise OSError("NIXL: the write was never begun")
        with _as_os_errors():
            progress = self._agent.check_xfer_state(self._handle)
            if progress == "PROC":
                return None
            self._release()
        if progress != "DONE":
            raise OSError(f"NIXL ended a write with {progress}")
        return self._chunk

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Where a write is under way, waits for it: there is no other way to know that it is over."""
        with contextlib.suppress(OSError):
            while self._handle is not None and self.advance() is None:
                time.sleep(_POLL_S)

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._agent.release_xfer_handle(handle)
