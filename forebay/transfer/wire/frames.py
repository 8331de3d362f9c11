"""All that two engines can say to each other: a closed set of plain types, msgpack on the wire.

Every number, name and length has its bounds in its type, which the decoder checks (C33). Bounds that depend on this
engine's own caches and vocabulary are in `bounds.py`.

Decode connects to prefill. `Hello` and `Challenge` agree on a session, `Introduce` and `Welcome` (or `Refused`) compare
layouts, then the transport is joined; from there on the frames are about tickets, each named by its nonce. Which places
are meant is said by position in the sequence: what a receiver writes where, its own offer says.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from forebay.requests.transfers import MAX_ROOM, Span, Tail
from forebay.requests.transfers import NONCE_BYTES as TICKET_NONCE_BYTES
from forebay.requests.updates import Failure
from forebay.transfer.session.layout import Layout, Name
from forebay.transfer.wire.framing import NONCE_BYTES
from forebay.transfer.wire.pages import OfferError

MAX_EPOCH: Final = 2**32 - 1  # that a frame's header has room for
MAX_POSITION: Final = 2**31 - 1  # of a token in a sequence
MAX_PIDS: Final = 1 << 22  # Linux gives no process a higher number
MAX_ID: Final = 2**31 - 1  # of a page or a slot, as in `req_to_token`
MAX_TICKETS: Final = 1 << 16  # that a beat names
MAX_KINDS: Final = 16
MAX_ADDRESS_BYTES: Final = 1 << 20
ID_BYTES: Final = 8

Instance = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{1,64}\Z")]
Epoch = Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
Protocol = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SessionNonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=TICKET_NONCE_BYTES, max_length=TICKET_NONCE_BYTES)]
Digest = Annotated[bytes, Meta(max_length=32)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Position = Annotated[int, Meta(ge=0, le=MAX_POSITION)]
Count = Annotated[int, Meta(ge=1, le=MAX_POSITION)]
Version = Annotated[int, Meta(ge=0, le=2**62)]
Kind = Annotated[str, Meta(max_length=32)]


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Decode's first frame on every connection. `epoch` counts its sessions with this prefill engine; a connection of
    chunks (`data`) belongs to the session of that epoch."""

    protocol: Protocol
    instance: Instance
    epoch: Epoch
    nonce: SessionNonce
    data: bool = False


class Challenge(msgspec.Struct, frozen=True, tag="challenge", kw_only=True):
    """Goes to whoever knows the cluster key, whatever protocol it speaks: every version keeps `Hello` and this."""

    protocol: Protocol
    instance: Instance
    nonce: SessionNonce


class Introduce(msgspec.Struct, frozen=True, tag="introduce", kw_only=True):
    """`transports` in the order in which decode would have them; `machine` is the same on one machine."""

    layout: Layout
    transports: Annotated[list[Name], Meta(max_length=16)]
    machine: Name


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """`pid` is prefill's, on its `machine`."""

    layout: Layout
    transport: Name
    machine: Name
    pid: Annotated[int, Meta(ge=0, le=MAX_PIDS)]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    failure: Failure


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first frame of a connection of chunks: who sends it has the session's key."""


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """Decode: what the transport needs to reach its memory."""

    address: Annotated[bytes, Meta(max_length=MAX_ADDRESS_BYTES)]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Prefill: chunks can be written."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The sender lives. Prefill names the tickets whose requests its engine has; none where that does not take news."""

    held: Annotated[list[Nonce], Meta(max_length=MAX_TICKETS)] = []


class Places(msgspec.Struct, frozen=True, array_like=True):
    """A `Span`: int64 ids, little-endian, of pages from token `start` on."""

    start: Position
    ids: bytes

    @classmethod
    def of(cls, span: Span) -> Places:
        return cls(span.start, span.ids.astype("<i8").tobytes())

    def span(self) -> Span:
        """Return the span. Raises OfferError for bytes that are not ids."""
        if len(self.ids) % ID_BYTES:
            raise OfferError(f"{len(self.ids)} bytes are no ids of {ID_BYTES} bytes each", code="invalid_offer")
        return Span(start=self.start, ids=np.frombuffer(self.ids, dtype="<i8"))


class Offering(msgspec.Struct, frozen=True, tag="offering", kw_only=True):
    nonce: Nonce
    room: Room
    num_tokens: Count
    digest: Digest
    start: Position
    places: Annotated[dict[Kind, Places], Meta(max_length=MAX_KINDS)]
    weight_version: Version = 0


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """Decode: there will be no offer for this prompt. It needs no transport, so it may come before `Joined`, and behind
    `Refused`."""

    nonce: Nonce
    room: Room
    num_tokens: Count
    digest: Digest
    failure: Failure


class Chunk(msgspec.Struct, frozen=True, tag="chunk", kw_only=True):
    """Positions [first, end) of regions [region, region + num_regions) of a kind, one region after the other: so many
    bytes with this checksum (XXH3, 64 bits)."""

    nonce: Nonce
    kind: Kind
    region: Position
    num_regions: Count
    first: Position
    end: Count
    num_bytes: Count
    checksum: Annotated[int, Meta(ge=0)]


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """Prefill: everything has been written, and nothing will be."""

    nonce: Nonce
    tail: Tail


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """Decode: everything has arrived."""

    nonce: Nonce


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Either side: this transfer will not come to its end."""

    nonce: Nonce
    failure: Failure


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """Prefill: nothing will be written any more, and nothing is being written."""

    nonce: Nonce


class Resting(msgspec.Struct, frozen=True, tag="resting"):
    """Prefill: whether it refuses what it is offered, because it is asleep or on its way there."""

    asleep: bool


ToPrefill = Hello | Attach | Introduce | Invite | Offering | Declined | Settled | Withdrawn | Beat
ToDecode = Challenge | Welcome | Refused | Joined | Resting | Chunk | Completed | Withdrawn | Fenced | Beat
