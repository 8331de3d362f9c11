"""Two engines' halves of transfers: what arrives, and how it ends."""

from __future__ import annotations

import msgspec
import pytest

from forebay.requests.transfers import AdapterIdentity, Offered
from forebay.transfer.wire import memory
from tests.transfer.ends import N
from tests.transfer.pair import BACKENDS, EVERYTHING, offer, pair, spans_of, transfer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_sizes", [(1, 1), (16, 16), (4, 16), (16, 4)], ids=str)
@pytest.mark.parametrize("run_bytes", [0, 1 << 30], ids=["straight", "buffered"])
def test_what_arrives_is_what_was_sent(
    backend: str, page_sizes: tuple[int, int], run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C21"""
    monkeypatch.setattr(memory, "RUN_BYTES", run_bytes)
    with pair(EVERYTHING, page_sizes=page_sizes, backend=backend) as (prefill, decode):
        transfer(prefill, decode, 45, in_pages=1)
        transfer(prefill, decode, 33, start=16, in_pages=0, seed=5)


def test_offer_reaches_prefill_with_the_adapter_that_decode_applies() -> None:
    """C34"""
    adapter = AdapterIdentity("of a customer", "0123456789abcdef" * 4)
    with pair() as (prefill, decode):
        made = msgspec.structs.replace(offer(prefill, decode, spans_of(decode, N), N), adapter=adapter)
        decode.transfers.submit(made)
        assert prefill.wait(Offered, made.ticket) == Offered(made.ticket, N, made.digest, 0, adapter=adapter)
