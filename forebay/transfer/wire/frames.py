"""All that two engines can say to each other: a closed set of plain types, msgpack on the wire.

Every number, name and length has its bounds in its type, which the decoder checks (C33). Bounds that depend on this
engine's own caches and vocabulary are checked by `Bounds`.

Decode connects to prefill. `Hello` and `Challenge` agree on a session, `Introduce` and `Welcome` (or `Refused`) compare
layouts, then the transport is joined; from there on the frames are about tickets, each named by its nonce. Which places
are meant is said by position in the sequence: what a receiver writes where, its own offer says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from forebay.base.errors import OfferError, RequestTimeout, Unavailable, WireError
from forebay.base.package import __version__
from forebay.config.engine_config import MAX_PAGE_SIZE
from forebay.config.media import MOST_IMAGES
from forebay.requests.pieces import MAX_POSITION, Chunk, Count, Kind, KindShape, Nonce, Position
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import MAX_ROOM, NO_ADAPTER, AdapterIdentity, Offered, Span, Tail, Ticket
from forebay.requests.updates import CacheReport, Failure

PROTOCOL: Final = 5  # of frames and chunks; another number is another language
MAX_COLUMNS: Final = 1 << 16
NONCE_BYTES: Final = 32  # of a session
MAX_CODE_CHARS: Final = 64
MAX_MESSAGE_CHARS: Final = 1 << 16
MAX_EPOCH: Final = 2**32 - 1  # that a frame's header has room for
MAX_PIDS: Final = 1 << 22  # Linux gives no process a higher number
MAX_ID: Final = 2**31 - 1  # of a page or a slot, as in `req_to_token`
MAX_TICKETS: Final = 1 << 16  # that a beat names
MAX_KINDS: Final = 16
MAX_ADDRESS_BYTES: Final = 1 << 20
ID_BYTES: Final = 8
PICTURE_DIGEST_BYTES: Final = hashlib.sha256().digest_size

Name = Annotated[str, Meta(max_length=256)]  # of a peer: compared with ours, and shown if it differs
Instance = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{1,64}\Z")]
Epoch = Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
Protocol = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SessionNonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(max_length=32)]
PictureDigest = Annotated[bytes, Meta(min_length=PICTURE_DIGEST_BYTES, max_length=PICTURE_DIGEST_BYTES)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Version = Annotated[int, Meta(ge=0, le=2**62)]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """`columns` are the lines of all that layers keep, `weights` the digest of what it is computed with, the engine's
    `weight_version`, `kernels` and `activation_bits` what else decides its bits; `draft_weights` are those of a
    checkpoint of its own that guesses and keeps some of the columns. `pictures` are the lines of what makes tokens of
    pictures."""

    protocol: Annotated[int, Meta(ge=0, le=2**31 - 1)] = PROTOCOL
    version: Name = __version__
    page_size: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)]
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    weight_version: Annotated[int, Meta(ge=0, le=2**62)] = 0
    weights: Name
    draft_weights: Name = ""
    quantization: Name
    dtype: Name
    kernels: Name
    activation_bits: Annotated[int, Meta(ge=0, le=64)]
    columns: Annotated[list[Name], Meta(max_length=MAX_COLUMNS)]
    pictures: Annotated[list[Name], Meta(max_length=MAX_COLUMNS)] = []

    @property
    def digest(self) -> str:
        """Return the digest of all fields but the page size, in which two engines may differ."""
        return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(self, page_size=0))).hexdigest()


def mismatch(prefill: Layout, decode: Layout) -> str:
    """Return the first difference of two layouts, with both values; "" where what one keeps serves the other. They are
    written in words and compared by a digest; if that differs, the words are compared."""
    if prefill.digest != decode.digest:
        for name in Layout.__struct_fields__:
            ours, theirs = getattr(prefill, name), getattr(decode, name)
            if isinstance(ours, list) and ours != theirs:
                return _lines_mismatch(name, ours, theirs)
            if name != "page_size" and ours != theirs:
                return f"{name}: prefill has {ours!r}, decode {theirs!r}"
    sizes = sorted((prefill.page_size, decode.page_size))
    if sizes[0] < 1 or sizes[1] % sizes[0]:
        return f"page_size: prefill has {prefill.page_size}, decode {decode.page_size}, and neither divides the other"
    return ""


def _lines_mismatch(name: str, prefill: list[str], decode: list[str]) -> str:
    for i in range(max(len(prefill), len(decode))):
        ours, theirs = ((lines[i] if i < len(lines) else "nothing") for lines in (prefill, decode))
        if ours != theirs:
            return f"{name}: prefill has {ours!r}, decode {theirs!r}"
    return ""


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Decode's first frame on every connection. `epoch` counts its sessions with this prefill engine; a connection of
    chunks (`data`) belongs to the session of that epoch."""

    protocol: Protocol
    instance: Instance
    epoch: Epoch
    nonce: SessionNonce
    data: bool = False


class Challenge(msgspec.Struct, frozen=True, tag="challenge", kw_only=True):
    """Sent to every peer that knows the cluster key, of any protocol: every version keeps `Hello` and this."""

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
    """Prefill: there will be no session, and why."""

    failure: Failure


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first frame of a connection of chunks: its sender has the session's key."""


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """Decode: what the transport needs to reach its memory."""

    address: Annotated[bytes, Meta(max_length=MAX_ADDRESS_BYTES)]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Prefill: chunks can be written."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The sender is alive. Prefill names the tickets that its engine has requests for; none while its engine takes no
    events."""

    held: Annotated[list[Nonce], Meta(max_length=MAX_TICKETS)] = []


class Places(msgspec.Struct, frozen=True, array_like=True):
    """A `Span`: int64 ids, little-endian, of pages from token `start` on."""

    start: Position
    ids: bytes

    @classmethod
    def of(cls, span: Span) -> Places:
        """Return the frame's form of a span."""
        return cls(span.start, span.ids.astype("<i8").tobytes())

    def span(self) -> Span:
        """Return the span. Raises OfferError for bytes that are not ids."""
        if len(self.ids) % ID_BYTES:
            raise OfferError(f"{len(self.ids)} bytes are no ids of {ID_BYTES} bytes each", code="invalid_offer")
        return Span(start=self.start, ids=np.frombuffer(self.ids, dtype="<i8"))


class Offering(msgspec.Struct, frozen=True, tag="offering", kw_only=True):
    """Decode: prefill may write what layers keep of a prompt from position `start` on to these places, computed with
    weights of this version, this adapter and pictures with these digests."""

    nonce: Nonce
    room: Room
    num_tokens: Count
    digest: Digest
    start: Position
    places: Annotated[dict[Kind, Places], Meta(max_length=MAX_KINDS)]
    weight_version: Version = 0
    adapter: AdapterIdentity = NO_ADAPTER
    pictures: Annotated[tuple[PictureDigest, ...], Meta(max_length=MOST_IMAGES)] = ()

    def event(self, ticket: Ticket) -> Offered:
        """Return the event of this offer for prefill's scheduler."""
        return Offered(
            ticket, self.num_tokens, self.digest, self.start, self.weight_version, self.adapter, self.pictures
        )


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """Decode: there will be no offer for this prompt. It needs no transport, so it may come before `Joined`, and behind
    `Refused`."""

    nonce: Nonce
    room: Room
    num_tokens: Count
    digest: Digest
    failure: Failure


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


# -- bounds that follow from this engine's caches and vocabulary -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """`check` is called once for each frame of a session, before anything in it is used (C33)."""

    shapes: Mapping[str, KindShape]
    vocab_size: int

    def check(self, frame: msgspec.Struct) -> None:
        """Raises WireError that names the first field out of bounds."""
        match frame:
            case Offering():
                self._check_offering(frame)
            case Declined(failure=failure) | Refused(failure) | Withdrawn(_, failure):
                _check_failure(failure)
            case Completed(_, tail):
                self._check_tail(tail)
            case _:
                pass

    def _check_offering(self, frame: Offering) -> None:
        num_tokens = frame.num_tokens
        _check("start", frame.start, 0, num_tokens - 1)
        for kind, places in frame.places.items():
            # Of a kind that is not kept here the offer alone is refused (`extents`).
            per_slot = kind in self.shapes and not self.shapes[kind].by_token
            most, last = (1, 0) if per_slot else (num_tokens, num_tokens)
            _check(f"{kind} places", len(places.ids) // ID_BYTES, 0, most)
            _check(f"{kind} start", places.start, 0, last)

    def _check_tail(self, tail: Tail) -> None:
        num_tokens = tail.num_tokens
        _check("num_tokens", num_tokens, 1, MAX_POSITION)
        _check("token_id", tail.token_id, 0, self.vocab_size - 1)
        self._check_report(tail.cache, num_tokens)
        listed = tail.prompt_logprobs or []
        _check("prompt_logprobs", len(listed), 0, num_tokens)
        for entry in (tail.logprob, *listed):
            if entry is not None:
                self._check_logprob(entry)

    def _check_report(self, report: CacheReport, num_tokens: int) -> None:
        _check("resumable", len(report.resumable), 0, MAX_KINDS)
        _check("tiers", len(report.tiers), 0, MAX_KINDS)
        for position in (
            report.cached_tokens,
            report.kv_tokens,
            *report.resumable.values(),
            *report.tiers.values(),
        ):
            _check("cached position", position, 0, num_tokens)
        _check("differs_at", report.differs_at, -1, num_tokens)
        for token_id in (report.token_here, report.token_there):
            _check("token that differs", token_id, -1, self.vocab_size - 1)

    def _check_logprob(self, entry: TokenLogprob) -> None:
        _check("token_id", entry.token_id, 0, self.vocab_size - 1)
        _check("rank", entry.rank, 0, self.vocab_size)
        _check("top_ids", len(entry.top_ids), len(entry.top_logprobs), len(entry.top_logprobs))
        _check("top_ids", len(entry.top_ids), 0, self.vocab_size)
        for token_id in entry.top_ids:
            _check("top token_id", token_id, 0, self.vocab_size - 1)
        if any(math.isnan(value) or value == math.inf for value in (entry.logprob, *entry.top_logprobs)):
            raise WireError("a log-probability is out of bounds: it is not a number or positive infinity")


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise WireError(f"{name} of a peer's frame is out of bounds: {value}; {low} to {high} are possible here")


def _check_failure(failure: Failure) -> None:
    words = {"kind": failure.kind, "code": failure.code}
    if failure.param is not None:
        words["param"] = failure.param
    for name, text in words.items():
        _check(f"characters in {name}", len(text), 1, MAX_CODE_CHARS)
        if not text.replace("_", "").isalnum() or not text.isascii():
            raise WireError(f"{name} of a peer's failure is out of bounds: letters, digits and _ are possible")
    _check("characters in message", len(failure.message), 0, MAX_MESSAGE_CHARS)


# -- failures: each has a code of its own; what another pair of servers can do is a 503 --------------------------------


def bootstrap_timeout(where: str, seconds: float) -> Failure:
    """Return the failure of tickets for a prefill server that did not answer in time."""
    return Failure.of(
        RequestTimeout(
            f"no session with the prefill server at {where} within {seconds:g} s: is it up, and is this its "
            "--disaggregation-bootstrap-port?",
            code="bootstrap_timeout",
        )
    )


def heartbeat_timeout(where: str, seconds: float) -> Failure:
    """Return the failure of a session whose peer was silent."""
    return Failure.of(RequestTimeout(f"{where} has not been heard of for {seconds:g} s", code="heartbeat_timeout"))


def lease_timeout(where: str, seconds: float) -> Failure:
    """Return the failure of a ticket on which the peer has made no progress."""
    return Failure.of(RequestTimeout(f"{where} has not gone on for {seconds:g} s", code="lease_timeout"))


def peer_lost(where: str, why: str) -> Failure:
    """Return the failure of a session whose connection has ended."""
    return Failure.of(Unavailable(f"the connection to {where} has ended: {why}", code="peer_lost"))


def peer_rejected(where: str, error: Exception) -> Failure:
    """The peer's message could not be handled: the peer, or this engine, has a bug."""
    what = f"{type(error).__name__} while a message of {where} was handled: the session has ended, and the log says why"
    return Failure.of(Unavailable(what, code="peer_rejected"))


def peer_asleep(where: str) -> Failure:
    """Return the failure of an offer to a prefill server that rests."""
    return Failure.of(Unavailable(f"the prefill server at {where} is asleep: send it again", code="peer_asleep"))


def layout_mismatch(difference: str) -> Failure:
    """Return the failure of a session between engines that do not fit together."""
    return Failure.of(Unavailable(f"prefill and decode do not fit together: {difference}", code="layout_mismatch"))


def no_transport(prefill: list[str], decode: list[str]) -> Failure:
    """Return the failure of a session without a transport that both sides have."""
    return Failure.of(
        Unavailable(
            f"no transfer backend in common: prefill has {prefill}, decode {decode}: see "
            "--disaggregation-transfer-backend",
            code="transfer_backend_mismatch",
        )
    )


def key_required(host: str) -> Failure:
    """Return the failure of tickets for another machine if there is no cluster key."""
    return Failure.of(
        Unavailable(f"{host} is not this machine: give both servers the same --cluster-key-file", code="cluster_key")
    )
