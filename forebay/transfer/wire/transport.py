"""The interface of transports: how chunks leave the memory of prefill and come into that of decode.

Chunks are gathered and checked by the thread that calls here (`data_thread.py`); nothing here waits."""

from __future__ import annotations

from typing import Protocol

from forebay.base.parts import I64
from forebay.transfer.wire.frames import Chunk
from forebay.transfer.wire.pages import KindShape, Piece


class Writer(Protocol):
    """Prefill's end towards one decode engine. One chunk at a time: `begin`, then `advance` until it has left.
    `holds_places`: between the two it reads this side's places, or writes the other's; `closes_at_once`: `close` ends
    that, where others are closed behind it alone; `is_lost`: nobody will ever know whether what it was at is over."""

    holds_places: bool
    closes_at_once: bool
    is_lost: bool

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        """`places` are decode's; a transport whose receiver writes by itself does not need them."""
        ...

    def advance(self) -> Chunk | None:
        """The chunk when it has left. OSError or WireError where it never will."""
        ...

    def fileno(self) -> int:
        """To wait for until it takes more; -1: ask again."""
        ...

    def close(self) -> None:
        """Afterwards nothing is read or written any more."""
        ...


class OneSided(Protocol):
    """A transport whose writer reaches into decode's memory by itself."""

    def reach(self, pid: int) -> Reach:
        """Decode: be ready for the process `pid` of this machine (0: one of another). OSError where that fails."""
        ...

    def join(self, address: bytes, page_size: int) -> tuple[Writer, dict[str, KindShape]]:
        """Prefill: follow an invitation of a decode engine with pages of `page_size` tokens; what shapes its caches
        have. May wait. OSError or WireError where it leads nowhere."""
        ...


class Reach(Protocol):
    """Decode's end towards one prefill process."""

    @property
    def invitation(self) -> bytes:
        """Bytes that the writer needs to connect."""
        ...

    def writer_is_dead(self) -> bool:
        """Whether it is known for certain that whoever was let in can write no more. Never a guess."""
        ...

    def close(self) -> None: ...
