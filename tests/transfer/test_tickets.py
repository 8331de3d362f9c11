"""The tables of ticket states, driven through every sequence of events (C22), and events without an entry (C33)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import pytest

from forebay.base.errors import WireError
from forebay.requests.transfers import Tail, Withdraw
from forebay.transfer.state.tickets import (
    DECODE,
    PREFILL,
    DecodeAction,
    DecodeEvent,
    PrefillAction,
    PrefillEvent,
    Received,
    Shipped,
    step,
)
from forebay.transfer.wire import frames
from tests.deadlines import wait_until
from tests.transfer.ends import GONE, N, assert_ends
from tests.transfer.scripted import decode_alone, scripted_offer


class Machine(NamedTuple):
    """A table, its first state, the reports of ends with what drops places, and the events that are errors."""

    table: dict
    first: Enum
    ends: set
    drop: Enum
    closed: Enum
    errors: set


DECODE_ERRORS = {
    *((state, event) for state in (Received.WAITING, Received.WAITING_LANDED) for event in (
        DecodeEvent.COMPLETED, DecodeEvent.UNTOUCHED)),
    (Received.WAITING_LANDED, DecodeEvent.LANDED),
    (Received.LANDED, DecodeEvent.LANDED),
    *((state, DecodeEvent.DROPPED) for state in Received if state not in (Received.CLOSING, Received.CLOSED)),
    *((Received.CLOSED, event) for event in DecodeEvent),
}  # fmt: skip
PREFILL_ERRORS = {
    (Shipped.COMPLETED, PrefillEvent.WRITTEN),
    (Shipped.CLOSING, PrefillEvent.WRITTEN),
    (Shipped.OPEN, PrefillEvent.DROPPED),
    (Shipped.COMPLETED, PrefillEvent.DROPPED),
    *((Shipped.CLOSED, event) for event in PrefillEvent),
}
MACHINES = {
    "decode": Machine(
        dict(DECODE),
        Received.WAITING,
        {DecodeAction.REPORT_ARRIVED, DecodeAction.REPORT_BROKEN},
        DecodeAction.DROP,
        DecodeAction.REPORT_CLOSED,
        DECODE_ERRORS,
    ),
    "prefill": Machine(
        dict(PREFILL),
        Shipped.OPEN,
        {PrefillAction.REPORT_SENT, PrefillAction.REPORT_BROKEN},
        PrefillAction.DROP,
        PrefillAction.REPORT_CLOSED,
        PREFILL_ERRORS,
    ),
}


@pytest.fixture(params=sorted(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def pairs(machine: Machine) -> Iterator[tuple[Enum, Enum]]:
    """Each state with each event."""
    events = type(next(iter(machine.table))[1])
    return ((state, event) for state in type(machine.first) for event in events)


def histories(machine: Machine) -> set[tuple[Enum, tuple[Enum, ...]]]:
    """Return each state together with the reports and drops so far, by every sequence of events that is no error."""
    told = {*machine.ends, machine.drop, machine.closed}
    found, new = set(), {(machine.first, ())}
    while new:
        found |= new
        reached = set()
        for state, history in new:
            for before, event in machine.table:
                if before is state:
                    after, actions = step(machine.table, state, event)
                    reached.add((after, history + tuple(action for action in actions if action in told)))
        assert all(len(history) < 9 for _, history in reached), "an end is reported again and again"
        new = reached - found
    return found


def test_tickets_every_event_in_every_state_has_an_entry_or_is_an_error(machine: Machine) -> None:
    for state, event in pairs(machine):
        assert ((state, event) in machine.table) is ((state, event) not in machine.errors), (state, event)


def test_tickets_event_without_an_entry_raises(machine: Machine) -> None:
    for state, event in machine.errors:
        with pytest.raises(WireError, match=f"event {event.name} came for a ticket in state {state.name}"):
            step(machine.table, state, event)


def test_c22_tickets_any_sequence_of_events_ends_once_drops_once_and_then_closes(machine: Machine) -> None:
    seen = histories(machine)
    assert {state for state, _ in seen} == {*type(machine.first)}, "a state is never reached"
    for state, history in seen:
        ends = [action for action in history if action in machine.ends]
        assert len(ends) <= 1
        assert history.count(machine.drop) <= 1
        assert (machine.closed in history) is (state.name == "CLOSED")
        if state.name == "CLOSED":
            assert history == (*ends, machine.drop, machine.closed)


def test_c22_tickets_every_state_leads_to_the_end(machine: Machine) -> None:
    left = {*type(machine.first)} - {type(machine.first)["CLOSED"]}
    ended = {type(machine.first)["CLOSED"]}
    while more := {before for (before, _), (after, _) in machine.table.items() if after in ended} & left:
        ended |= more
        left -= more
    assert not left


def test_c33_peer_that_completes_a_ticket_which_it_was_never_offered_ends_its_session() -> None:
    with decode_alone() as (peer, decode):
        made = scripted_offer(peer, decode)
        peer.control = peer._accept("scripted")
        peer.control.wait(frames.Introduce)
        peer.control.send(frames.Completed(made.ticket.nonce, Tail(num_tokens=N, token_id=1)))
        wait_until(lambda: decode.transfers.num_rejected == 1)
        assert decode.take_updates() == []
        decode.transfers.submit(Withdraw(made.ticket, GONE))
        assert_ends(decode, made.ticket)
