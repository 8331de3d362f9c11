"""C33: each number, name and length of a peer's frame has both bounds, before anything is done with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.base.errors import OfferError, WireError
from forebay.requests.pieces import KindShape
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import AdapterIdentity, Span, Tail
from forebay.requests.updates import CacheReport, Failure
from forebay.transfer.session.peers import UNLIMITED
from forebay.transfer.wire import frames
from forebay.transfer.wire.frames import PROTOCOL, Bounds, Layout
from tests.transfer.ends import GONE, N, code_of
from tests.transfer.pair import layout_of
from tests.transfer.scripted import decode_alone, hello, scripted_offer

NONCE = b"n" * 16
SHAPE = KindShape(by_token=True, page_size=4, num_ids=100, bytes_per_place=(8,))
BOUNDS = Bounds({"kv": SHAPE, "state": replace(SHAPE, by_token=False, page_size=1)}, vocab_size=100)
TAIL = Tail(num_tokens=N, token_id=3)
LOGPROB = TokenLogprob(3, -1.0, 1, [3], [-1.0])
LAYOUT = Layout(
    page_size=4, vocab_size=9, weights="w", quantization="", dtype="", kernels="", activation_bits=8, columns=[]
)
OFFERING = frames.Offering(nonce=NONCE, room=1, num_tokens=9, digest=b"", start=0, places={})
INTRODUCE = frames.Introduce(layout=LAYOUT, transports=["tcp"], machine="")


@pytest.mark.parametrize(
    ("frame", "changes"),
    [
        *((hello("i", 1), {"epoch": epoch}) for epoch in (0, -1, 2**32, 2**44)),
        (hello("i", 1), {"nonce": b"n"}),
        (hello("i", 1), {"instance": "i\n"}),
        *((INTRODUCE, {"layout": msgspec.structs.replace(LAYOUT, page_size=size)}) for size in (0, -4, 1025, 2**44)),
        (INTRODUCE, {"transports": ["tcp"] * 17}),
        (INTRODUCE, {"machine": "m" * 257}),
        *((OFFERING, {"nonce": nonce}) for nonce in (b"", b"n" * 15, b"n" * 17, b"n" * 1_000_000)),
        *((OFFERING, {"num_tokens": count}) for count in (0, -1, 2**31, 2**63 - 1)),
        *((OFFERING, {"room": room}) for room in (-1, 2**63)),
        (OFFERING, {"start": -1}),
        (OFFERING, {"adapter": AdapterIdentity("n" * 129, "")}),
        *((OFFERING, {"adapter": AdapterIdentity("n", bad)}) for bad in ("a", "A" * 64, "a" * 65, "a" * 64 + "\n")),
        (OFFERING, {"places": {str(i): frames.Places(0, b"") for i in range(17)}}),
        (OFFERING, {"places": {"kv": frames.Places(2**31, b"")}}),
        (frames.Beat(), {"held": [b"n"]}),
        (frames.Invite(b""), {"address": b"a" * ((1 << 20) + 1)}),
    ],
)
def test_frame_field_out_of_bounds_is_no_frame(frame: msgspec.Struct, changes: dict[str, Any]) -> None:
    union = frames.ToPrefill
    encoded = msgspec.msgpack.encode(frame)
    assert msgspec.msgpack.decode(encoded, type=union) == frame
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(frame, **changes)), type=union)


@pytest.mark.parametrize(
    "changes",
    [
        *({"token_id": token_id} for token_id in (-1, 100, 2**63 - 1)),
        *({"num_tokens": count} for count in (0, -1, 2**31)),
        {"prompt_logprobs": [None] * (N + 1)},
        *({"logprob": msgspec.structs.replace(LOGPROB, logprob=value)} for value in (float("nan"), float("inf"))),
        {"prompt_logprobs": [msgspec.structs.replace(LOGPROB, top_logprobs=[float("nan")])]},
        {"logprob": msgspec.structs.replace(LOGPROB, token_id=100)},
        {"logprob": msgspec.structs.replace(LOGPROB, top_ids=[100])},
        {"logprob": msgspec.structs.replace(LOGPROB, top_ids=[3, 4])},
        {"logprob": msgspec.structs.replace(LOGPROB, rank=101)},
        {"cache": CacheReport(cached_tokens=N + 1)},
        {"cache": CacheReport(resumable={"state": -1})},
        {"cache": CacheReport(resumable=dict.fromkeys(map(str, range(17)), 1))},
        {"cache": CacheReport(differs_at=N + 1)},
        {"cache": CacheReport(token_there=100)},
    ],
)
def test_tail_field_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    BOUNDS.check(frames.Completed(NONCE, TAIL))
    BOUNDS.check(
        frames.Completed(NONCE, msgspec.structs.replace(TAIL, logprob=LOGPROB, prompt_logprobs=[None, LOGPROB]))
    )
    with pytest.raises(WireError):
        BOUNDS.check(frames.Completed(NONCE, msgspec.structs.replace(TAIL, **changes)))


@pytest.mark.parametrize(
    "failure",
    [Failure("", "c", ""), Failure("K", "a b", ""), Failure("K", "c" * 65, ""), Failure("K", "c", "m" * 65537)],
)
def test_failure_out_of_bounds_is_refused(failure: Failure) -> None:
    for frame in (frames.Refused, lambda why: frames.Withdrawn(NONCE, why)):
        BOUNDS.check(frame(GONE))
        with pytest.raises(WireError):
            BOUNDS.check(frame(failure))


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 9},
        {"places": {"kv": frames.Places(0, b"\1" * 80)}},
        {"places": {"kv": frames.Places(10, b"\1" * 8)}},
        {"places": {"state": frames.Places(0, b"\1" * 16)}},
        {"places": {"state": frames.Places(1, b"\1" * 8)}},
    ],
)
def test_offering_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    BOUNDS.check(OFFERING)
    with pytest.raises(WireError):
        BOUNDS.check(msgspec.structs.replace(OFFERING, **changes))


@pytest.mark.parametrize(
    "digests", [[b"\1" * 31], [b"\1" * 33], [b"\1" * 32] * 257, [3]], ids=["31", "33", "257", "int"]
)
def test_c33_offering_with_digests_of_other_lengths_or_of_too_many_images_is_refused(digests: list[Any]) -> None:
    named = msgspec.structs.replace(OFFERING, pictures=(b"\1" * 32,) * 256)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(named), type=frames.Offering) == named
    wrong = msgspec.msgpack.encode(msgspec.structs.replace(OFFERING, pictures=tuple(digests)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wrong, type=frames.Offering)


def test_decode_token_outside_the_vocabulary_ends_the_session() -> None:
    """It would be read as a row of the embedding."""
    with decode_alone(backend="tcp") as (peer, decode):
        made = scripted_offer(peer, decode)
        peer.join(decode, layout_of(decode.cache), "tcp")
        peer.control.wait(frames.Offering)
        nonce = made.ticket.nonce
        peer.control.send(frames.Completed(nonce, Tail(num_tokens=N, token_id=100)), frames.Withdrawn(nonce, GONE))
        assert code_of(decode, made.ticket) == "peer_lost"
        assert decode.transfers.num_rejected == 1


def test_ids_of_a_pool_that_prefill_does_not_map_are_those_of_32_bits() -> None:
    shape = replace(SHAPE, num_ids=UNLIMITED)
    shape.check(Span(start=0, ids=np.array([1, 2**31 - 1])), "kv")
    for ids in ([2**31], [0], [-1]):
        with pytest.raises(OfferError, match="are not of"):
            shape.check(Span(start=0, ids=np.array(ids)), "kv")


@pytest.mark.parametrize(
    ("frame", "changes"),
    [
        (hello("i", 1), {"epoch": 2**32 - 1, "instance": "i" * 64}),
        (INTRODUCE, {"layout": msgspec.structs.replace(LAYOUT, page_size=1024), "transports": ["t"] * 16}),
        (INTRODUCE, {"machine": "m" * 256}),
        (OFFERING, {"num_tokens": 2**31 - 1, "room": 2**63 - 1}),
        (OFFERING, {"places": {str(i): frames.Places(2**31 - 1, b"") for i in range(16)}}),
        (frames.Invite(b""), {"address": b"a" * (1 << 20)}),
        (frames.Beat(), {"held": [NONCE] * (1 << 16)}),
    ],
)
def test_frame_field_at_its_bound_is_taken(frame: msgspec.Struct, changes: dict[str, Any]) -> None:
    largest = msgspec.structs.replace(frame, **changes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(largest), type=frames.ToPrefill) == largest


@pytest.mark.parametrize(
    ("frame", "changes"),
    [
        (frames.Beat(), {"held": [NONCE] * ((1 << 16) + 1)}),
        (frames.Welcome(LAYOUT, "tcp", "m", 1 << 22), {"pid": (1 << 22) + 1}),
        (frames.Welcome(LAYOUT, "tcp", "m", 0), {"layout": msgspec.structs.replace(LAYOUT, columns=["c"] * 65_537)}),
    ],
)
def test_frame_of_either_side_with_one_more_than_its_bound_is_no_frame(
    frame: msgspec.Struct, changes: dict[str, Any]
) -> None:
    for type_ in (frames.ToPrefill, frames.ToDecode):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(frame, **changes)), type=type_)


def test_places_are_allocated_by_what_is_sent() -> None:
    """And not by the page size, which is the peer's word."""
    ids = np.array([5, 7], dtype=np.int64)
    places = replace(SHAPE, page_size=2**48).places(Span(start=0, ids=ids), 2**48 - 1, 2**48 + 2)
    assert places.tolist() == [5 * 2**48 + 2**48 - 1, 7 * 2**48, 7 * 2**48 + 1]


def test_protocol_of_another_version_can_still_be_read() -> None:
    for protocol in (0, PROTOCOL + 1):
        frame = msgspec.structs.replace(hello("i", 1), protocol=protocol)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=frames.Hello) == frame
