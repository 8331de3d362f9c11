"""Chunks copied straight into the other engine's cache, which on one machine, or on one GPU, both processes can map.

Decode's cache is in files without names, of the host's memory or of a GPU's. Their descriptors are sent to prefill over
a socket of this machine, to a process of the same user that knows the session's secret; from then on prefill writes
there by itself. So a time-out does not close a ticket: prefill's message does, or the end of its process, which a
process descriptor reports. The system ends a process's work on a GPU before it reports that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from forebay.base.child import process_has_ended
from forebay.base.errors import WireError
from forebay.base.log import event, get_logger
from forebay.base.parts import I64
from forebay.config.engine_config import Chaos
from forebay.pools.mover import Region
from forebay.requests.pieces import Chunk, KindShape, Piece, chunk_of
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.memory import (
    U8,
    Bytes,
    Endpoint,
    Memory,
    OneSided,
    Place,
    Reach,
    Transport,
    Writer,
    check_all,
    chunk_bytes,
)

WORD_BYTES: Final = 32
MAX_FILES: Final = 250  # Linux sends 253 descriptors at once (SCM_MAX_FD)
_NAME: Final = re.compile(rb"\0forebay-[0-9a-f]{32}")  # abstract: no file of this machine can be named
_MESSAGE_BYTES: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

log = get_logger("transfer")


class _Address(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    word: bytes


class _Files(msgspec.Struct, frozen=True, array_like=True):
    """By region in order: the kind, the number of the file, the offset in it, and how many bytes."""

    regions: list[tuple[str, int, int, int]]

    def end_of(self, file: int) -> int:
        """Return the end of the last region in a file."""
        return max((offset + num_bytes for _, at, offset, num_bytes in self.regions if at == file), default=0)


class Shm(OneSided):
    """`place` finds `regions` in files that another process can map; None if there are none, which is allowed on
    prefill."""

    one_machine = True

    def __init__(
        self,
        shapes: dict[str, KindShape],
        memory: Memory,
        regions: Sequence[Region],
        place: Place | None,
        *,
        timeout_s: float,
        chaos: Chaos,
    ) -> None:
        self._shapes, self._memory, self._regions = shapes, memory, regions
        self._place, self._timeout_s, self._faults = place, timeout_s, Faults(chaos, time.monotonic)

    def reach(self, pid: int) -> ShmReach:
        """Open this memory to one writer. `pid` is not used: the kernel reports which process connects."""
        assert self._place is not None, "decode was to know where its caches are"
        return ShmReach(self._regions, self._place, self._timeout_s)

    def join(self, address: bytes, page_size: int) -> tuple[ShmWriter, dict[str, KindShape]]:
        return join(
            address,
            self._shapes,
            self._memory,
            page_size=page_size,
            timeout_s=self._timeout_s,
            faults=self._faults,
        )


class ShmReach(Reach):
    """Decode's end: lets one process in, and knows when it has ended."""

    def __init__(self, regions: Sequence[Region], place: Place, timeout_s: float) -> None:
        self._word = secrets.token_bytes(WORD_BYTES)
        self._name = b"\0forebay-" + secrets.token_hex(16).encode()
        found = [place(region.address) for region in regions]
        self._fds = sorted({fd for fd, _ in found})
        self._files = _Files(
            [
                (region.kind, self._fds.index(fd), offset, region.num_bytes)
                for region, (fd, offset) in zip(regions, found, strict=True)
            ]
        )
        self._process = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._name)
        self._listener.listen(1)
        self._listener.settimeout(timeout_s)
        self._guest: socket.socket | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._let_in, name="shm", daemon=True)
        self._thread.start()

    @property
    def invitation(self) -> bytes:
        return msgspec.msgpack.encode(_Address(self._name, self._word))

    def writer_is_dead(self) -> bool:
        """Call it after `close`, when no further writer is admitted."""
        return self._process < 0 or process_has_ended(self._process)

    def close(self) -> None:
        """Admit no writer any more. Earlier writers are still known: `writer_is_dead`."""
        self._is_closing = True
        for sock in (self._listener, self._guest):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def __del__(self) -> None:
        if self._process >= 0:
            os.close(self._process)

    def _let_in(self) -> None:
        try:
            guest, _ = self._listener.accept()
            with guest:
                self._guest = guest
                guest.settimeout(self._listener.gettimeout())
                if not self._is_closing:
                    self._admit(guest)
        except (OSError, WireError) as error:
            log.info(event("shm_nobody_came", why=str(error)))

    def _admit(self, guest: socket.socket) -> None:
        """Open the descriptor of the process before the files are sent: every possible writer is always known. Its
        answer afterwards proves that the process number was still its own."""
        credentials = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid() or pid == 0:
            raise WireError(f"process {pid} of user {uid} asked for the caches of user {os.getuid()}")
        if not secrets.compare_digest(guest.recv(WORD_BYTES + 1), self._word):
            raise WireError(f"process {pid} does not know the word")
        process = os.pidfd_open(pid)
        guest.send(b"\0")
        if guest.recv(1) != b"\0":
            os.close(process)
            raise WireError(f"process {pid} went away")
        self._process = process
        socket.send_fds(guest, [msgspec.msgpack.encode(self._files)], self._fds)
        guest.recv(1)


def join(
    address: bytes,
    shapes: Mapping[str, KindShape],
    memory: Memory,
    *,
    page_size: int,
    timeout_s: float,
    faults: Faults,
) -> tuple[ShmWriter, dict[str, KindShape]]:
    """Return the writer for an invitation, and the shapes of the caches there.

    Raises OSError or WireError for an invitation that leads to no decode engine, or to memory that does not fit.
    """
    there = msgspec.msgpack.decode(address, type=_Address)
    if not _NAME.fullmatch(there.name) or len(there.word) != WORD_BYTES:
        raise WireError("the invitation of the peer names no socket of a decode engine")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        sock.connect(there.name)
        sock.send(there.word)
        sock.recv(1)
        sock.send(b"\0")
        message, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, MAX_FILES)
        try:
            files = msgspec.msgpack.decode(message, type=_Files)
            maps = [memory.map_file(fd, files.end_of(i)) for i, fd in enumerate(fds)]
        except msgspec.MsgspecError as error:
            raise WireError(f"the caches of the peer were not to be had: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        found, theirs = _regions(files, maps, shapes, page_size)
        sock.send(b"\0")
    return ShmWriter(memory.of_peer(found), memory, memory.staging(chunk_bytes(shapes)), faults), theirs


def _regions(
    files: _Files, maps: Sequence[Bytes], shapes: Mapping[str, KindShape], page_size: int
) -> tuple[dict[str, list[tuple[Bytes, int]]], dict[str, KindShape]]:
    """Return by kind each region and the bytes of a place of it, and the shapes of the caches there."""
    found: dict[str, list[tuple[Bytes, int]]] = {kind: [] for kind in shapes}
    theirs: dict[str, KindShape] = {}
    for kind, file, offset, num_bytes in files.regions:
        shape = shapes.get(kind)
        index = len(found.get(kind, ()))
        if shape is None or index >= len(shape.bytes_per_place) or not 0 <= file < len(maps):
            raise WireError(f"the peer has a region of {kind} that is not of this layout")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > len(maps[file]):
            raise WireError(f"a region of {kind} is at {offset}, {num_bytes} bytes, of a file of {len(maps[file])}")
        size, place_bytes = page_size if shape.by_token else 1, shape.bytes_per_place[index]
        num_ids = num_bytes // (size * place_bytes)
        if num_bytes % place_bytes:
            raise WireError(f"a region of {kind} has {num_bytes} bytes, and a place of it {place_bytes}")
        found[kind].append((maps[file][offset : offset + num_bytes], place_bytes))
        known = theirs.get(kind)
        theirs[kind] = replace(shape, page_size=size, num_ids=min(num_ids, known.num_ids if known else num_ids))
    check_all(found, shapes)
    return found, theirs


class ShmWriter(Writer):
    """Copies chunks from one cache to the other at once, so nothing is ever under way."""

    holds_places = False
    closes_at_once = True
    is_lost = False

    def __init__(self, there: Memory, memory: Memory, staging: U8, faults: Faults) -> None:
        self._there, self._memory, self._faults = there, memory, faults
        self._staging = staging
        self._chunk: Chunk | None = None

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        if self._faults.loses():
            checksum = self._memory.sum(piece, self._staging)
        else:
            checksum = self._memory.copy(piece, self._there, places, self._staging) ^ self._faults.alters()
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), checksum)

    def advance(self) -> Chunk | None:
        return self._chunk

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._there = self._memory.of_peer({})


class _Shm(Transport):
    maps_caches = True

    def unfit(self, endpoint: Endpoint, place: Place | None) -> str:
        if sys.platform != "linux" or (place is None and not endpoint.options.is_prefill):
            return "the cache is not in memory that other processes can map: use auto or tcp"
        num_files = len({place(region.address)[0] for region in endpoint.regions}) if place else 0
        if num_files > MAX_FILES:
            return f"the cache is in {num_files} files, and {MAX_FILES} can be sent to a peer: use auto or tcp"
        return ""

    def open(self, endpoint: Endpoint, place: Place | None) -> Shm:
        options = endpoint.options
        return Shm(
            endpoint.shapes,
            endpoint.memory,
            endpoint.regions,
            place,
            timeout_s=options.bootstrap_timeout_s,
            chaos=options.chaos,
        )


TRANSPORT: Final = _Shm()
