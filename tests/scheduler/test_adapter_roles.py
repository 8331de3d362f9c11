"""Adapters of requests with two halves: each engine computes with the same one, or both halves end (C8, C22, C34)."""

from __future__ import annotations

from array import array

import pytest

from forebay.memory.adapters import AdapterLoad
from forebay.requests.request import Status
from forebay.requests.transfers import (
    NO_ADAPTER,
    AdapterIdentity,
    Broken,
    Closed,
    Offered,
    Sent,
    Ticket,
    Withdraw,
    digest_of,
)
from tests.scheduler.roles import BROKEN, Half, arrive, decode, prefill

A, B = "a" * 64, "b" * 64
X, Y = AdapterIdentity("x", A), AdapterIdentity("y", A)
PROMPT = [100, 101, 102, 103, 104]
OFFERED = Ticket("d", 5, b"n")


def load(half: Half, of: AdapterIdentity, *, replace: bool = False) -> AdapterLoad:
    adapters = half.scheduler.pools.adapters
    adapter = adapters.begin(of.name, f"/{of.name}", replace=replace)
    adapter.digest = of.digest
    adapters.loaded(adapter)
    return adapter


def offered(adapter: AdapterIdentity) -> Offered:
    return Offered(OFFERED, len(PROMPT), digest_of(array("i", PROMPT)), 0, adapter=adapter)


def refusals(half: Half) -> list[str]:
    half.take_orders()
    return [order.failure.code for order in half.orders if isinstance(order, Withdraw)]


def nothing_is_held(half: Half) -> bool:
    """Neither memory, but for what is cached, nor a use of an adapter."""
    half.scheduler.audit()
    users = sum(adapter.num_users for adapter in half.scheduler.pools.adapters)
    return (half.scheduler.pools.available_pages, half.scheduler.handoff.tickets.num_open, users) == (64, 0, 0)


def test_decode_offer_has_the_name_and_the_digest_of_its_requests_adapter() -> None:
    half = decode(max_loras=1)
    adapter = load(half, X)
    half.meet(5, room=1)
    half.meet(5, room=2, adapter=adapter)
    half.step()
    assert [order.adapter for order in half.orders] == [NO_ADAPTER, X]


def test_prefill_offer_with_the_same_adapter_is_computed_with_it() -> None:
    half = prefill(max_loras=1)
    half.meet(PROMPT, adapter=load(half, X))
    half.hear(offered(X))
    plan = half.step()
    assert plan is not None
    assert [admission.adapter for admission in plan.admissions] == [1]


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (X, AdapterIdentity("x", B), "prefill has 'x' (sha256 aaaaaaaaaaaaaaaa), decode 'x' (sha256 bbbbbbbbbbbbbbbb)"),
        (X, NO_ADAPTER, "prefill has 'x' (sha256 aaaaaaaaaaaaaaaa), decode no adapter"),
        (NO_ADAPTER, X, "prefill has no adapter, decode 'x' (sha256 aaaaaaaaaaaaaaaa)"),
        (X, Y, "prefill has 'x' (sha256 aaaaaaaaaaaaaaaa), decode 'y' (sha256 aaaaaaaaaaaaaaaa)"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_prefill_offer_with_another_adapter_ends_both_halves(
    ours: AdapterIdentity, theirs: AdapterIdentity, message: str, early: bool
) -> None:
    half = prefill(max_loras=2)
    loaded = {adapter.name: adapter for adapter in (load(half, X), load(half, Y))}
    if early:
        half.hear(offered(theirs))
    req = half.meet(PROMPT, adapter=loaded.get(ours.name))
    if not early:
        half.hear(offered(theirs))
    half.updates += half.scheduler.take_updates()
    assert half.failure_of(req) == "adapter_mismatch"
    assert refusals(half) == ["adapter_mismatch"]
    assert message in half.orders[-1].failure.message
    assert nothing_is_held(half)


def test_prefill_offer_with_an_adapter_that_nobody_can_name_is_refused_at_once() -> None:
    half = prefill(max_loras=1)
    half.hear(offered(X))
    assert refusals(half) == ["model_not_found"]  # as prefill's own server refuses the name
    assert "the adapter 'x' is not loaded on the prefill server" in half.orders[-1].failure.message


def test_prefill_offer_waits_for_an_adapter_that_is_being_loaded() -> None:
    half = prefill(max_loras=1)
    adapters = half.scheduler.pools.adapters
    loading = adapters.begin("x", "/x")
    half.hear(offered(X))
    assert refusals(half) == []
    loading.digest = A
    adapters.loaded(loading)
    assert half.meet(PROMPT, adapter=loading).status is Status.WAITING


def test_adapter_that_is_unloaded_serves_a_half_until_its_transfer_has_ended() -> None:
    half = prefill(max_loras=1)
    adapters, adapter = half.scheduler.pools.adapters, load(half, X)
    req = half.meet(PROMPT, adapter=adapter)
    adapters.unload("x")
    half.hear(offered(X))
    half.step()
    assert (req.status, adapters.draining) == (Status.TRANSFERRING, [adapter])
    half.hear(Sent(OFFERED))
    assert adapters.draining == []
    half.hear(Closed(OFFERED))
    assert nothing_is_held(half)


def test_adapter_that_is_loaded_anew_on_one_side_is_another() -> None:
    half = decode(max_loras=2)
    old = load(half, X)
    half.meet(PROMPT, room=1, adapter=old)
    new = load(half, AdapterIdentity("x", B), replace=True)
    half.meet(PROMPT, room=2, adapter=new)
    half.step()
    assert [order.adapter.digest for order in half.orders] == [A, B]


@pytest.mark.parametrize("ends", ["broken", "aborted", "arrived"])
def test_decode_half_uses_its_adapter_until_it_ends(ends: str) -> None:
    half = decode(max_loras=1)
    adapters, adapter = half.scheduler.pools.adapters, load(half, X)
    req = half.meet(PROMPT, adapter=adapter, max_new=2)
    half.step()
    (offer,) = half.orders
    adapters.unload("x")
    assert (req.status, adapter.num_users) == (Status.TRANSFERRING, 1)
    match ends:
        case "broken":
            half.hear(Broken(offer.ticket, BROKEN))
        case "aborted":
            half.abort(req.id)
        case "arrived":
            arrive(half, offer)
            assert adapter.num_users == 1
            half.run()
    assert (adapter.num_users, adapters.draining) == (0, [])
    half.hear(Closed(offer.ticket))
    assert half.scheduler.pools.deferred.entries == []
    assert nothing_is_held(half)
