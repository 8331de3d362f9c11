"""Chunks by NIXL: one-sided writes by whatever UCX finds between the two engines, from RDMA to shared memory.

Runs of places that are neighbours on both sides are one descriptor. A write that is under way cannot be taken back, so
a ticket whose chunk it is stays open until it has ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
from nixl_cu12 import _bindings
from nixl_cu12._api import nixl_agent, nixl_agent_config

from forebay.disagg.frames import Chunk
from forebay.disagg.memory import HostMemory, chunk_bytes, runs
from forebay.disagg.pages import KindShape, Piece
from forebay.disagg.seal import WireError
from forebay.disagg.shm import check_all, has_ended
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
    """By region in order: the kind, where it lies, and how many bytes."""

    agent: bytes
    regions: list[tuple[str, int, int]]


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

    def reach(self, pid: int) -> NixlReach:
        regions = [(region.kind, region.address, region.num_bytes) for region in self._regions]
        return NixlReach(msgspec.msgpack.encode(_Invitation(self._agent.get_agent_metadata(), regions)), pid)

    def join(self, address: bytes, page_size: int) -> tuple[NixlWriter, dict[str, KindShape]]:
        invitation = msgspec.msgpack.decode(address, type=_Invitation)
        found: dict[str, list[int]] = {kind: [] for kind in self._shapes}
        theirs: dict[str, KindShape] = {}
        for kind, begin, num_bytes in invitation.regions:
            shape = self._shapes.get(kind)
            if shape is None or len(found[kind]) >= len(shape.bytes_per_place):
                raise WireError(f"the peer has a region of {kind} that is not of this layout")
            size = page_size if shape.by_token else 1
            num_ids = num_bytes // (size * shape.bytes_per_place[len(found[kind])])
            known = theirs.get(kind)
            theirs[kind] = replace(shape, page_size=size, num_ids=min(num_ids, known.num_ids if known else num_ids))
            found[kind].append(begin)
        check_all(found, self._shapes)
        ours = {kind: [region.address for region in self._regions if region.kind == kind] for kind in self._shapes}
        with _as_os_errors():
            peer = self._agent.add_remote_agent(invitation.agent)
        return NixlWriter(self._agent, peer, self._memory, self._shapes, ours, found), theirs


class NixlReach:
    """`pid` 0: a process of another machine, whose end nobody here can see; its word alone counts."""

    def __init__(self, invitation: bytes, pid: int) -> None:
        self._invitation = invitation
        self._process = os.pidfd_open(pid) if pid else -1  # that it was its own still, what it says later proves

    @property
    def invitation(self) -> bytes:
        return self._invitation

    def writer_is_dead(self) -> bool:
        return self._process >= 0 and has_ended(self._process)

    def close(self) -> None:
        """What was registered stays: a writer may still be at it."""

    def __del__(self) -> None:
        if self._process >= 0:
            os.close(self._process)


class NixlWriter:
    holds_places = True
    closes_at_once = False

    def __init__(
        self,
        agent: Any,
        peer: str,
        memory: HostMemory,
        shapes: Mapping[str, KindShape],
        ours: Mapping[str, Sequence[int]],
        theirs: Mapping[str, Sequence[int]],
    ) -> None:
        self._agent, self._peer, self._memory, self._shapes = agent, peer, memory, shapes
        self._ours, self._theirs = ours, theirs
        self._staging = memory.staging(chunk_bytes(shapes))
        self._handle: Any = None
        self._chunk: Chunk | None = None

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        bounds = np.array(runs(piece.places, places))
        here, there = piece.places[bounds[:, 0]], places[bounds[:, 0]]
        lengths = bounds[:, 1] - bounds[:, 0]
        local: list[I64] = []
        remote: list[I64] = []
        for region in range(piece.region, piece.region + piece.num_regions):
            size = self._shapes[piece.kind].bytes_per_place[region]
            for found, at, begin in (
                (local, here, self._ours[piece.kind][region]),
                (remote, there, self._theirs[piece.kind][region]),
            ):
                found.append(np.stack([begin + at * size, lengths * size, np.full_like(at, _DEVICE)], axis=1))
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), self._memory.sum(piece, self._staging))
        with _as_os_errors():
            both = [
                self._agent.get_xfer_descs(np.concatenate(some).astype(np.uint64), _KIND_OF_MEMORY)
                for some in (local, remote)
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
