"""What messages say where nothing was set, and the sizes that two engines agree on."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import Conflict, EngineError, ForebayError, InvalidRequest, Overloaded
from forebay.requests.account import Account
from forebay.requests.pieces import CHUNK_BYTES, MAX_POSITION
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, Encode, HostWork, StepResult, TokenLogprob
from forebay.requests.transfers import (
    CHECK,
    DIGEST_BYTES,
    MAX_ROOM,
    NO_ADAPTER,
    NONCE_BYTES,
    AdapterIdentity,
    Offer,
    Rendezvous,
    Span,
    Tail,
    Ticket,
    digest_of,
)
from forebay.requests.updates import CacheReport, Failure, MemoryReport, Update

OFFER = Offer(ticket=Ticket("a", 1, b""), host="h", port=1, num_tokens=1, digest=b"", start=0, spans={})
ADMISSION = Admission(
    row=1, request_id=2, params=SamplingParams(), token_ids=np.arange(3, dtype=np.int32), num_prompt=3
)
ENCODE = Encode(picture=1, tile=0, first_layer=0, last_layer=1, height=2, width=2)


def values(message: Any, *set_ones: str) -> list[Any]:
    """Its fields but for those that were set."""
    names = getattr(message, "__struct_fields__", None) or message.__slots__
    return [getattr(message, name) for name in names if name not in set_ones]


@pytest.mark.parametrize(
    ("message", "set_ones"),
    [
        (Update(1, []), ("request_id",)),
        (MemoryReport(), ()),
        (CacheReport(), ("differs_at", "token_here", "token_there", "miss_reason")),
        (Account("a"), ("name", "weight")),
        (Rendezvous("h", 1, 2), ("host", "port", "room")),
        (Tail(1, 2), ("num_tokens", "token_id", "cache")),
        (ADMISSION, ("row", "request_id", "params", "token_ids", "num_prompt")),
        (ENCODE, ("picture", "tile", "first_layer", "last_layer", "height", "width", "rows")),
        (HostWork(), ()),
        (StepResult(token_ids=[]), ("num_ranks",)),
        (TokenLogprob(1, -0.5, 1), ("token_id", "logprob", "rank")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_message_of_which_nothing_was_set_says_nothing(message: Any, set_ones: tuple[str, ...]) -> None:
    assert not any(values(message, *set_ones))


def test_message_defaults_that_are_not_zero() -> None:
    report = CacheReport()
    assert (report.differs_at, report.token_here, report.token_there, report.miss_reason.value) == (-1, -1, -1, "none")
    assert Account("a").weight == 1
    assert Tail(1, 2).cache == report
    assert (OFFER.weight_version, OFFER.adapter) == (0, NO_ADAPTER)


def test_sizes_on_which_two_engines_agree() -> None:
    """An engine of another version reads as many bytes, and refuses as much."""
    assert (DIGEST_BYTES, NONCE_BYTES, MAX_ROOM, MAX_POSITION) == (16, 16, 2**63 - 1, 2**31 - 1)
    assert CHUNK_BYTES == 16 * 1024 * 1024
    digest = digest_of(array("i", [1, 2]))
    assert len(digest) == 16 != len(CHECK)
    assert digest != digest_of(array("i", [2, 1]))


def test_adapter_is_named_in_an_error_with_16_digits_of_its_digest() -> None:
    assert str(AdapterIdentity("é", "0123456789abcdef" * 4)) == "'\\xe9' (sha256 0123456789abcdef)"
    assert str(NO_ADAPTER) == "no adapter"
    assert not Span(start=0, ids=np.array([1])).ids.flags.writeable


@pytest.mark.parametrize("kind", [InvalidRequest, Conflict, Overloaded, EngineError])
def test_failure_is_the_error_again_with_its_kind_message_code_and_field(kind: type[ForebayError]) -> None:
    for param in ("a_field", None):
        error = Failure.of(kind("why it is so", code="a_code", param=param)).error
        assert (type(error), error.message, error.code, error.param) == (kind, "why it is so", "a_code", param)


def test_failure_of_an_unknown_kind_is_an_engine_error() -> None:
    error = Failure("SomethingNew", "a_code", "why it is so", "a_field").error
    assert (type(error), error.message, error.code, error.param) == (EngineError, "why it is so", "a_code", "a_field")
