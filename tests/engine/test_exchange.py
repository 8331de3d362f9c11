"""The exchange of a scheduler with its transfers: what decode adds to an offer, and the order of what is submitted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.config.engine_config import DisaggregationMode
from forebay.engine.loop.exchange import Exchange
from forebay.requests.transfers import NONCE_BYTES, Rendezvous
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import Scheduler
from tests.scheduler.rig import config
from tests.transfer.pair import OPTIONS


class Noting:
    """Transfers that note what they are given."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def submit(self, order: object) -> None:
        self.given.append(order)

    def weights_changed(self, path: str | None, version: int) -> None:
        self.given.append((path, version))


def exchange(mode: DisaggregationMode) -> tuple[Exchange, Noting]:
    options, noting = replace(OPTIONS, mode=mode), Noting()
    role = DecodeRole(options, "decode-1") if options.is_decode else PrefillRole(options)
    transfers: Any = noting
    return Exchange(Scheduler(config(disaggregation=options), None, role), transfers), noting


def test_with_nonce_decode_gives_each_offer_another_and_keeps_the_rest() -> None:
    there = Rendezvous(host="10.0.0.1", port=8998, room=7)
    made, _ = exchange(DisaggregationMode.DECODE)
    given = [made.with_nonce(there) for _ in range(2)]
    assert len({offer.nonce for offer in given if offer}) == 2
    assert {len(offer.nonce) for offer in given if offer} == {NONCE_BYTES}
    assert all(offer and (offer.host, offer.port, offer.room) == ("10.0.0.1", 8998, 7) for offer in given)
    assert made.with_nonce(None) is None


def test_with_nonce_prefill_adds_none() -> None:
    there = Rendezvous(host="10.0.0.1", port=8998, room=7)
    assert exchange(DisaggregationMode.PREFILL)[0].with_nonce(there) == there


@pytest.mark.parametrize("path", ["model-v2", None])
def test_weights_changed_submits_what_was_decided_with_the_old_ones_first(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, noting = exchange(DisaggregationMode.DECODE)
    monkeypatch.setattr(made._scheduler.handoff.tickets, "take_orders", lambda: ["an order"])
    made.weights_changed(path, 3)
    assert noting.given == ["an order", (path, 3)]


def test_state_counts_each_phase_of_a_transfer_in_its_own_field(monkeypatch: pytest.MonkeyPatch) -> None:
    made, noting = exchange(DisaggregationMode.DECODE)
    noting.num_unfenced, noting.num_rejected = 5, 7  # type: ignore[attr-defined]
    queues = SimpleNamespace(pending=[1], transferring=[1, 2])
    scheduler = SimpleNamespace(queues=queues, handoff=SimpleNamespace(tickets=SimpleNamespace(num_open=3)))
    monkeypatch.setattr(made, "_scheduler", scheduler)
    state = made.state()
    counts = (state.pending, state.transferring, state.open, state.unfenced, state.rejected)
    assert counts == (1, 2, 3, 5, 7)
