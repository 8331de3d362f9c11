"""A check of two running servers: decode asks for a pattern, prefill sends one, through slots of no request.

A check waits as requests do, and running requests continue meanwhile.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from forebay.base.errors import ForebayError, RequestTimeout, Unavailable
from forebay.engine.frames import Checked, CheckTransfers
from forebay.requests.transfers import (
    CHECK,
    NONCE_BYTES,
    Arrived,
    Broken,
    Closed,
    Event,
    Offer,
    Offered,
    Order,
    Renewed,
    Send,
    Span,
    Tail,
    Ticket,
    Withdraw,
)
from forebay.requests.updates import Failure
from forebay.scheduler.handoff import ASLEEP, Role
from forebay.scheduler.scheduler import Scheduler

MOST_BYTES: Final = 64 << 20  # so that making and comparing them holds up nobody for long
SHARE: Final = 4  # of the pages that can be had, one in so many
ROOM: Final = 0  # a label


class Pattern(Protocol):
    """The test pattern that should arrive in some places. `wrong` names the regions with other values."""

    @property
    def num_bytes(self) -> int: ...

    def write(self) -> None:
        """Write the pattern into its places."""

    def clear(self) -> None:
        """Overwrite its places with zeros, so that a pattern of an earlier check is not taken for an arrival."""

    def wrong(self) -> list[str]:
        """Describe the regions that do not hold the pattern; an empty list if all do."""


class Patterned(Protocol):
    """Transfers between processes, as far as checks know them."""

    instance: str

    @property
    def layout(self) -> msgspec.Struct: ...

    @property
    def token_bytes(self) -> int: ...

    def submit(self, order: Order) -> None:
        """Hand an order over to the transfers; the outcome arrives as an event."""

    def pattern(self, spans: dict[str, Span], num_tokens: int) -> Pattern:
        """Return the test pattern of `num_tokens` tokens in these places of each kind of cache."""

    def transport(self, host: str, port: int) -> str:
        """Return the name of the transport to the prefill server at this address."""


@dataclass(slots=True)
class _Check:
    """One side's. `asked` is what decode was asked for, None on prefill and once it is answered."""

    ticket: Ticket
    pattern: Pattern
    asked: CheckTransfers | None = None
    deadline: float = 0.0
    arrived: Arrived | None = None


class Checks:
    """Transfer checks of one engine in a role; owned by its thread, and nothing here waits."""

    def __init__(self, scheduler: Scheduler, transfers: Patterned) -> None:
        self._scheduler, self._transfers = scheduler, transfers
        self._options = scheduler.config.disaggregation
        self._open: dict[Ticket, _Check] = {}
        self._answers: list[tuple[int, Checked | Failure]] = []

    def take_answers(self) -> list[tuple[int, Checked | Failure]]:
        """By the serial of the frame that asked."""
        answers, self._answers = self._answers, []
        return answers

    def begin(self, asked: CheckTransfers, now: float) -> None:
        """Start a check that a client asked for. If it cannot start, its answer is the failure."""
        try:
            self._begin(asked, now)
        except ForebayError as error:
            self._answers.append((asked.serial, Failure.of(error)))

    def _begin(self, asked: CheckTransfers, now: float) -> None:
        assert self._options.is_decode, "who asks has looked"
        role = self._role()
        most = MOST_BYTES // max(1, self._transfers.token_bytes)
        num_tokens = max(1, min(most, role.spare.most_tokens // SHARE))
        ticket = Ticket(self._transfers.instance, ROOM, secrets.token_bytes(NONCE_BYTES))
        spans = role.spare.set_aside(ticket, num_tokens)
        check = _Check(ticket, self._transfers.pattern(spans, num_tokens), asked, now + self._options.lease_s)
        check.pattern.clear()
        self._open[ticket] = check
        self._transfers.submit(
            Offer(
                ticket=ticket,
                host=asked.host,
                port=asked.port,
                num_tokens=num_tokens,
                digest=CHECK,
                start=0,
                spans=spans,
            )
        )

    def _role(self) -> Role:
        """Unavailable for an engine that starts nothing just now."""
        role = self._scheduler.handoff
        assert isinstance(role, Role), "transfers without a role"
        if not self._scheduler.queues.admits:
            raise Unavailable(ASLEEP.message, code=ASLEEP.code)
        return role

    def take(self, event: Event, now: float) -> bool:
        """Return whether this event belonged to a check."""
        if isinstance(event, Offered) and event.digest == CHECK:
            if event.declined is None:  # else decode has ended it itself, and takes nothing
                self._answer(event)
            return True
        check = self._open.get(event.ticket)
        if check is None:
            return False
        match event:
            case Arrived():
                check.arrived = event
            case Renewed():
                check.deadline = now + self._options.lease_s
            case Broken(_, failure):
                self._fail(check, failure)
            case Closed():
                del self._open[event.ticket]
                self._finish(check)
                self._scheduler.handoff.take(event, now)
            case _:
                pass
        return True

    def expire(self, now: float) -> None:
        """End the checks whose deadline has passed with RequestTimeout, and withdraw their tickets."""
        for check in self._open.values():
            if check.asked and now > check.deadline:
                late = RequestTimeout(f"prefill has sent nothing for {self._options.lease_s:g} s", code="lease_timeout")
                failure = Failure.of(late)
                self._transfers.submit(Withdraw(check.ticket, failure))
                self._fail(check, failure)

    def _answer(self, offered: Offered) -> None:
        """Prefill: send the requested pattern."""
        ticket, num_bytes = offered.ticket, offered.num_tokens * self._transfers.token_bytes
        try:
            if num_bytes > MOST_BYTES:
                raise Unavailable(f"a check of {num_bytes} bytes: at most {MOST_BYTES}", code="no_room")
            spans = self._role().spare.set_aside(ticket, offered.num_tokens)
        except ForebayError as error:
            self._transfers.submit(Withdraw(ticket, Failure.of(error)))
            return
        check = self._open[ticket] = _Check(ticket, self._transfers.pattern(spans, offered.num_tokens))
        check.pattern.write()
        tail = Tail(num_tokens=offered.num_tokens, token_id=0)
        self._transfers.submit(Send(ticket=ticket, spans=spans, tail=tail))

    def _fail(self, check: _Check, failure: Failure) -> None:
        """Answer with the failure; the places stay reserved while a peer may still write to them."""
        if check.asked:
            self._answers.append((check.asked.serial, failure))
        check.asked = None

    def _finish(self, check: _Check) -> None:
        """Answer with the result, once no peer writes any more and before the places are freed."""
        if check.asked is None or check.arrived is None:
            return
        checked = Checked(
            num_bytes=check.pattern.num_bytes,
            bytes_per_s=check.arrived.bytes_per_s,
            transport=self._transfers.transport(check.asked.host, check.asked.port),
            layout=msgspec.to_builtins(self._transfers.layout),
            wrong=check.pattern.wrong(),
        )
        self._answers.append((check.asked.serial, checked))
