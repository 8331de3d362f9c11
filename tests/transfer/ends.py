"""How tickets end, and how soon whoever waits for a silent peer gives it up."""

from __future__ import annotations

from dataclasses import replace

from forebay.requests.transfers import Broken, Closed, Ticket
from forebay.requests.updates import Failure
from tests.transfer.pair import OPTIONS, Half

# Silence is found after three beats: soon, or not before a busy machine has come round to whoever seems silent.
QUICK = replace(OPTIONS, heartbeat_s=0.3)
STEADY = replace(OPTIONS, heartbeat_s=1.0)
GONE = Failure("EngineError", "aborted", "the client went away")
N = 45


def failure_of(half: Half, ticket: Ticket) -> Failure:
    broken = half.wait(Broken, ticket)
    assert isinstance(broken, Broken)
    return broken.failure


def code_of(half: Half, ticket: Ticket) -> str:
    return failure_of(half, ticket).code


def assert_ends(half: Half, ticket: Ticket) -> None:
    """Once, and then for good."""
    half.wait(Closed, ticket)
    ends = [name for name in half.by_ticket[ticket.nonce] if name not in ("Offered", "Renewed")]
    assert ends[0] in ("Arrived", "Sent", "Broken")
    assert ends[1:] == ["Closed"]
