"""Chunks by NIXL: one-sided writes by whatever UCX finds between the two engines, from RDMA to shared memory.

Runs of places that are neighbours on both sides are one descriptor. A write that is under way cannot be taken back, so
a ticket whose chunk it is stays open until it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import numpy as np

from forebay.requests.pieces import Chunk
from forebay.transfer.wire.by_address import (
    LibraryTransport,
    OneSidedByAddress,
    Stretches,
    WriterByAddress,
    not_installed,
)
from forebay.transfer.wire.memory import Endpoint, Place

try:
    from nixl_cu12 import _bindings as nixl
except ImportError as error:
    raise not_installed("nixl", error, "nixl-cu12") from error

_DEVICE: Final = 0
_LOOK_US: Final = 1000  # of its thread, where nothing wakes it: its Python interface says 0, which takes a core
_ERRORS: Final = tuple(vars(nixl)[name] for name in dir(nixl) if name.endswith("Error"))  # no common base


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise OSError(f"NIXL: {type(error).__name__}: {error}") from error


class NixlWriter(WriterByAddress):
    """Writes chunks by NIXL, a request for each chunk."""

    _request: int | None = None

    def _write(self, stretches: Stretches) -> None:
        devices = np.full_like(stretches.lengths, _DEVICE)
        with _as_os_errors():
            both = [
                nixl.nixlXferDList(
                    nixl.DRAM_SEG, np.stack([begins, stretches.lengths, devices], axis=1).astype(np.uint64)
                )
                for begins in (stretches.ours, stretches.theirs)
            ]
            self._request = self._library.createXferReq(nixl.NIXL_WRITE, *both, self._peer)
            self._library.postXferReq(self._request)  # what comes of it, `advance` asks

    def advance(self) -> Chunk | None:
        if self._request is None:
            raise OSError("NIXL: the write was never begun")
        with _as_os_errors():
            status = self._library.getXferStatus(self._request)
            if status == nixl.NIXL_IN_PROG:
                return None
            request, self._request = self._request, None
            self._library.releaseXferReq(request)
        if status != nixl.NIXL_SUCCESS:
            raise OSError(f"NIXL ended a write with {status}")
        return self._chunk


class Nixl(OneSidedByAddress):
    """One agent for all peers."""

    writer = NixlWriter

    def _start(self, name: str) -> object:
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _LOOK_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT  # peers join beside the thread that writes
        agent = nixl.nixlAgent(name, config)
        agent.createBackend("UCX", {})
        caches = [(begin, num_bytes, _DEVICE, "") for _, begin, num_bytes in self._regions]
        agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, caches))
        return agent

    def _end(self) -> bytes:
        metadata: bytes = self._library.getLocalMD()
        return metadata

    def _meet(self, end: bytes) -> str:
        with _as_os_errors():
            peer: str = self._library.loadRemoteMD(end).decode()
        return peer


class _Nixl(LibraryTransport):
    def open(self, endpoint: Endpoint, place: Place | None) -> Nixl:
        return Nixl(endpoint.instance, endpoint)


TRANSPORT: Final = _Nixl()
