"""Messages between a scheduler and the component that moves caches between engines: ids and lengths, no bytes and no
sockets.

A request that is computed on one engine (prefill) and generated on another (decode) has one ticket on both. Decode
offers places for all caches of its prompt; prefill sends these as its steps commit, and with the last of them the tail.
A ticket's events end with `Arrived` (decode), `Sent` (prefill) or `Broken`, and then `Closed`: from then on no engine
touches the places that it named. Until then they stay out of use, however long that takes. Data that has arrived is not
read before either, so `Closed` should follow `Arrived` as soon as the writer has confirmed it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from forebay.base.parts import I64, Part
from forebay.config.adapters import MAX_NAME
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, Failure

DIGEST_BYTES: Final = 16
NONCE_BYTES: Final = 16  # of a ticket
SHOWN_DIGITS: Final = 16  # of an adapter's digest, in an error
MAX_ROOM: Final = 2**63 - 1
CHECK: Final = b"a check, no request"  # the digest of offers that want a pattern; no prompt's is so long


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """The address of the other half of a request: prefill listens at `host` and `port`, and the sender of both halves
    chose the number of the room. It is a label and may come twice; an offer is known by its `nonce` (16 random bytes,
    decode's; empty on the side of prefill)."""

    host: str
    port: int
    room: int
    nonce: bytes = b""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a transfer: the engine that made the offer (an id of its process's own), the room, the nonce."""

    peer: str
    room: int
    nonce: bytes


class AdapterIdentity(msgspec.Struct, frozen=True, array_like=True):
    """The adapter that a request applies, which two engines compare before one computes for the other: its name, and
    the digest of what it adds (SHA-256 in hexadecimal digits, of the layers' names, factors, tensors and rounding)."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    digest: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]

    def __str__(self) -> str:
        return f"{self.name!a} (sha256 {self.digest[:SHOWN_DIGITS]})" if self.name else "no adapter"


NO_ADAPTER: Final = AdapterIdentity("", "")


def digest_of(tokens: array[int]) -> bytes:
    """Return the digest of a prompt's ids, int32, with the model's placeholder for pictures. An offer finds its request
    by this and the number of its room."""
    return blake2b(tokens, digest_size=DIGEST_BYTES).digest()


class Span(Part, frozen=True, kw_only=True):
    """Slots of one kind of cache: of pages those of the tokens from `start` (a multiple of the page size) on, one after
    the other; of states the one that a sequence has, with `start` 0. Where the two sides' pages differ in size their
    spans may begin at different tokens: what only one of them names is not needed."""

    start: int
    ids: I64

    def __post_init__(self) -> None:
        self.ids.setflags(write=False)


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The end of a transfer: KV of `num_tokens` tokens has been sent, and `token_id` was sampled behind them. The first
    token's log-probability and the prompt's come where the request asked for them; `cache` says what of the prompt was
    in prefill's cache."""

    num_tokens: int
    token_id: int
    cache: CacheReport = CacheReport()
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


# -- what a scheduler asks for -----------------------------------------------------------------------------------------


class Offer(Part, frozen=True, kw_only=True):
    """Decode: fetch the caches of a prompt of `num_tokens` tokens whose ids have this `digest`, from token `start` on
    (a multiple of the page size: the tokens before it are cached here), into these places by kind of cache. Weights of
    this version compute it with this adapter, and with the pictures that have these digests."""

    ticket: Ticket
    host: str
    port: int
    num_tokens: int
    digest: bytes
    start: int
    spans: dict[str, Span]
    weight_version: int = 0
    adapter: AdapterIdentity = NO_ADAPTER
    pictures: tuple[bytes, ...] = ()


class Withdraw(msgspec.Struct, frozen=True):
    """Either side: the request has ended, and its data is neither needed nor available any more. `failure` is sent to
    the other side."""

    ticket: Ticket
    failure: Failure


class Send(Part, frozen=True, kw_only=True):
    """Prefill: completed steps have written these places, by kind of cache. `tail` comes with a ticket's last."""

    ticket: Ticket
    spans: dict[str, Span]
    tail: Tail | None = None


class Decline(msgspec.Struct, frozen=True):
    """Decode: its half of the request of this prompt has ended before there was an offer, so none will come."""

    ticket: Ticket
    host: str
    port: int
    num_tokens: int
    digest: bytes
    failure: Failure


class Rest(msgspec.Struct, frozen=True):
    """Prefill: whether offers are refused from now on, because the engine is asleep or on its way there."""

    asleep: bool


Order = Offer | Decline | Withdraw | Send | Rest


# -- what it learns ----------------------------------------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True):
    """Prefill: decode has places for a prompt of `num_tokens` tokens with this digest, from token `start` on, and
    computes with weights of this version, this adapter and pictures with these digests; or the reason why it will not
    have any."""

    ticket: Ticket
    num_tokens: int
    digest: bytes
    start: int
    weight_version: int = 0
    adapter: AdapterIdentity = NO_ADAPTER
    pictures: tuple[bytes, ...] = ()
    declined: Failure | None = None


class Renewed(msgspec.Struct, frozen=True):
    """Decode: prefill lives and still has the request, so its lease begins anew."""

    ticket: Ticket


class Arrived(msgspec.Struct, frozen=True):
    """Decode: all has been written, and checked against the sender's sums. `bytes_per_s` is the rate of the chunks
    behind the first, 0 if there was one."""

    ticket: Ticket
    tail: Tail
    bytes_per_s: float = 0.0


class Sent(msgspec.Struct, frozen=True):
    """Prefill: decode has said that all has arrived."""

    ticket: Ticket


class Broken(msgspec.Struct, frozen=True):
    """The transfer will not come to its end."""

    ticket: Ticket
    failure: Failure


class Closed(msgspec.Struct, frozen=True):
    """The last of a ticket: no engine reads or writes its places any more."""

    ticket: Ticket


Event = Offered | Renewed | Arrived | Sent | Broken | Closed


class Transfers(Protocol):
    """Interface of the component that executes orders, on threads of its own; neither call waits."""

    def submit(self, order: Order) -> None:
        """Queue an order; its outcome arrives later as an event."""

    def poll(self) -> Sequence[Event]:
        """Return the events since the last call; those of one ticket are in order."""
        ...
