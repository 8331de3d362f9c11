"""All that two engines can say to each other: a closed set of plain types, msgpack on the wire.

Decode connects to prefill. `Hello` and `Challenge` agree on a session, `Introduce` and `Welcome` (or `Refused`) compare
layouts, then the transport is joined; from there on the frames are about tickets, each named by its nonce. Which places
are meant is said by position in the sequence: what a receiver writes where, its own offer says.
"""

from __future__ import annotations

import msgspec
import numpy as np

from forebay.disagg.layout import Layout
from forebay.disagg.pages import OfferError
from forebay.requests.transfers import Span, Tail
from forebay.requests.updates import Failure


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Decode's first frame on every connection. `epoch` counts its sessions with this prefill engine; a connection of
    chunks (`data`) belongs to the session of that epoch."""

    protocol: int
    instance: str
    epoch: int
    nonce: bytes
    data: bool = False


class Challenge(msgspec.Struct, frozen=True, tag="challenge", kw_only=True):
    """Goes to whoever knows the cluster key, whatever protocol it speaks: every version keeps `Hello` and this."""

    protocol: int
    instance: str
    nonce: bytes


class Introduce(msgspec.Struct, frozen=True, tag="introduce", kw_only=True):
    """`transports` in the order in which decode would have them; `machine` is the same on one machine."""

    layout: Layout
    transports: list[str]
    machine: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """`pid` is prefill's, on its `machine`."""

    layout: Layout
    transport: str
    machine: str
    pid: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    failure: Failure


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first frame of a connection of chunks: who sends it has the session's key."""


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """Decode: what the transport needs to reach its memory."""

    address: bytes


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Prefill: chunks can be written."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The sender lives. Prefill names the tickets whose requests its engine has; none where that does not take news."""

    held: list[bytes] = []


class Places(msgspec.Struct, frozen=True, array_like=True):
    """A `Span`: int64 ids, little-endian, of pages from token `start` on."""

    start: int
    ids: bytes

    @classmethod
    def of(cls, span: Span) -> Places:
        return cls(span.start, span.ids.astype("<i8").tobytes())

    def span(self) -> Span:
        """OfferError for bytes that are no ids."""
        if len(self.ids) % 8:
            raise OfferError(f"{len(self.ids)} bytes are no ids", code="invalid_offer")
        return Span(start=self.start, ids=np.frombuffer(self.ids, dtype="<i8"))


class Offering(msgspec.Struct, frozen=True, tag="offering", kw_only=True):
    nonce: bytes
    room: int
    num_tokens: int
    digest: bytes
    start: int
    places: dict[str, Places]
    weight_version: int = 0


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """Decode: there will be no offer for this prompt. It needs no transport, so it may come before `Joined`, and behind
    `Refused`."""

    nonce: bytes
    room: int
    num_tokens: int
    digest: bytes
    failure: Failure


class Chunk(msgspec.Struct, frozen=True, tag="chunk", kw_only=True):
    """Positions [first, end) of regions [region, region + num_regions) of a kind, one region after the other: so many
    bytes with this checksum (XXH3, 64 bits)."""

    nonce: bytes
    kind: str
    region: int
    num_regions: int
    first: int
    end: int
    num_bytes: int
    checksum: int


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """Prefill: everything has been written, and nothing will be."""

    nonce: bytes
    tail: Tail


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """Decode: everything has arrived."""

    nonce: bytes


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Either side: this transfer will not come to its end."""

    nonce: bytes
    failure: Failure


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """Prefill: nothing will be written any more, and nothing is being written."""

    nonce: bytes


class Resting(msgspec.Struct, frozen=True, tag="resting"):
    """Prefill: whether it refuses what it is offered, because it is asleep or on its way there."""

    asleep: bool


ToPrefill = Hello | Attach | Introduce | Invite | Offering | Declined | Settled | Withdrawn | Beat
ToDecode = Challenge | Welcome | Refused | Joined | Resting | Chunk | Completed | Withdrawn | Fenced | Beat
