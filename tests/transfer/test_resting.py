"""Prefill engines that sleep, and engines of other weights: decode knows before it asks (C22, C31)."""

from __future__ import annotations

from forebay.config.engine_config import DisaggregationMode
from forebay.requests.transfers import Broken, Closed, Decline, Offered, Rest
from forebay.scheduler.handoff import ASLEEP
from tests.deadlines import wait_until
from tests.transfer.pair import Half, half, offer, pair, spans_of, transfer

N = 30


def failure_of(prefill: Half, decode: Half) -> str:
    made = offer(prefill, decode, spans_of(decode, N), N)
    decode.transfers.submit(made)
    broken = decode.wait(Broken, made.ticket)
    decode.wait(Closed, made.ticket)
    assert isinstance(broken, Broken)
    return f"{broken.failure.code}: {broken.failure.message}"


def test_decode_refuses_by_itself_what_a_sleeping_prefill_would_and_hears_that_it_wakes() -> None:
    with pair() as (prefill, decode):
        transfer(prefill, decode, N)
        prefill.transfers.submit(Rest(asleep=True))
        where = (decode.transfers._stage._peers)["127.0.0.1", prefill.transfers.port]
        wait_until(lambda: where.rests)
        assert failure_of(prefill, decode).startswith("peer_asleep: the prefill server at 127.0.0.1:")
        late = half(DisaggregationMode.DECODE)  # who comes later is told as well
        try:
            made = offer(prefill, late, spans_of(late, N), N)
            late.transfers.submit(made)
            prefill.wait(Offered, made.ticket)
            wait_until(lambda: late.transfers._stage._peers["127.0.0.1", prefill.transfers.port].rests)
        finally:
            late.transfers.close()
        prefill.transfers.submit(Rest(asleep=False))
        wait_until(lambda: not where.rests)
        transfer(prefill, decode, N)


def test_prefill_hears_of_whom_decode_refuses_by_itself_since_it_may_have_woken_meanwhile() -> None:
    with pair() as (prefill, decode):
        transfer(prefill, decode, N)
        prefill.transfers.submit(Rest(asleep=True))
        where = (decode.transfers._stage._peers)["127.0.0.1", prefill.transfers.port]
        wait_until(lambda: where.rests)
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        heard = prefill.wait(Offered, made.ticket)
        assert isinstance(heard, Offered)
        assert heard.declined is not None
        assert heard.declined.code == "peer_asleep"
        decode.wait(Closed, made.ticket)


def test_prefill_hears_of_who_will_not_come_in_the_first_session_and_in_later_ones() -> None:
    with pair() as (prefill, decode):
        for _ in range(2):
            made = offer(prefill, decode, spans_of(decode, N), N)  # which is not given
            decode.transfers.submit(Decline(made.ticket, made.host, made.port, N, made.digest, ASLEEP))
            heard = prefill.wait(Offered, made.ticket)
            assert heard == Offered(made.ticket, N, made.digest, 0, declined=ASLEEP)
            transfer(prefill, decode, N)


def test_c31_weights_that_change_on_one_side_end_what_the_two_have_in_common_until_they_do_on_the_other() -> None:
    with pair() as (prefill, decode):
        transfer(prefill, decode, N)
        prefill.transfers.weights_changed(None, 1)
        wait_until(lambda: not prefill.transfers._stage._sessions and not decode.transfers._stage._peers)
        assert failure_of(prefill, decode).endswith("weight_version: prefill has 1, decode 0")
        decode.transfers.weights_changed(None, 1)
        wait_until(lambda: not decode.transfers._stage._peers)
        transfer(prefill, decode, N)
