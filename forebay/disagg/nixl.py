"""Chunks by NIXL: one-sided writes by whatever UCX finds between the two engines, from RDMA to shared memory.

Runs of places that are neighbours on both sides are one descriptor. A write that is under way cannot be taken back, so
a ticket whose chunk it is stays open until it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from nixl_cu12 import _bindings
from nixl_cu12._api import nixl_agent, nixl_agent_config

from forebay.disagg.addresses import ReachByAddress, Stretches, Told, WriterByAddress, shapes_there, told
from forebay.disagg.frames import Chunk
from forebay.disagg.memory import HostMemory
from forebay.disagg.pages import KindShape
from forebay.pools.table import Region

_KIND_OF_MEMORY: Final = "DRAM"
_DEVICE: Final = 0


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
        self._shapes, self._memory, self._regions = shapes, memory, told(regions)
        self._agent: Any = nixl_agent(instance, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory(
            [(begin, num_bytes, _DEVICE, "") for _, begin, num_bytes in self._regions], _KIND_OF_MEMORY
        )

    def reach(self, pid: int) -> ReachByAddress:
        invitation = _Invitation(self._agent.get_agent_metadata(), self._regions)
        return ReachByAddress(msgspec.msgpack.encode(invitation), pid)

    def join(self, address: bytes, page_size: int) -> tuple[NixlWriter, dict[str, KindShape]]:
        invitation = msgspec.msgpack.decode(address, type=_Invitation)
        theirs = shapes_there(invitation.regions, self._shapes, page_size)
        with _as_os_errors():
            peer = self._agent.add_remote_agent(invitation.agent)
        both = self._regions, invitation.regions
        return NixlWriter(self._agent, peer, self._memory, self._shapes, *both), theirs


class NixlWriter(WriterByAddress):
    _handle: Any = None

    def _write(self, stretches: Stretches) -> None:
        devices = np.full_like(stretches.lengths, _DEVICE)
        with _as_os_errors():
            both = [
                self._library.get_xfer_descs(
                    np.stack([begins, stretches.lengths, devices], axis=1).astype(np.uint64), _KIND_OF_MEMORY
                )
                for begins in (stretches.ours, stretches.theirs)
            ]
            self._handle = self._library.initialize_xfer("WRITE", *both, self._peer)
            self._library.transfer(self._handle)  # what comes of it, `advance` asks

    def advance(self) -> Chunk | None:
        if self._handle is None:
            raise OSError("NIXL: the write was never begun")
        with _as_os_errors():
            progress = self._library.check_xfer_state(self._handle)
            if progress == "PROC":
                return None
            handle, self._handle = self._handle, None
            self._library.release_xfer_handle(handle)
        if progress != "DONE":
            raise OSError(f"NIXL ended a write with {progress}")
        return self._chunk
