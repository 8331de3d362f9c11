"""The policy of an engine's role in the scheduler; an engine that computes whole requests needs none.

On a server for prompts or for decoding a request has its other half on another engine. Its `Ticket` is open here from
the offer until the places that it named are not accessed any more (`OpenTicket`), and memory that a request releases
meanwhile is freed then. The scheduler tells its role what happens to requests; the role writes orders, takes
events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, Unavailable
from forebay.config.engine_config import DisaggregationOptions
from forebay.memory.slots import Ids
from forebay.requests.request import Request
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Closed, Event, Rendezvous, digest_of
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.journal import Transferred
from forebay.scheduler.queues import Queues
from forebay.scheduler.spare_places import SparePlaces
from forebay.scheduler.tickets import OpenTicket, Tickets

ABORTED: Final = Failure.of(EngineError("the request was aborted by its client", code="aborted"))
ASLEEP: Final = Failure.of(
    Unavailable("one of the request's two servers sleeps, or takes other weights: send it again", code="peer_asleep")
)
LOST: Final = Failure.of(EngineError("the transfer ended before all had been written", code="transfer_lost"))


class Outputs(Protocol):
    """The output processor, as far as roles use it."""

    updates: list[Update]

    def append(self, req: Request, tokens: list[int], logprobs: list[TokenLogprob | None] | None, now: float) -> int:
        """Append sampled tokens, record the update, and return how many tokens the request took before it ended."""

    def finish(
        self, req: Request, reason: FinishReason, failure: Failure | None = None, update: Update | None = None
    ) -> None:
        """End the request, free what it holds, and record its last update."""


class Handoff:
    """The role of an engine that computes whole requests. What others do differently they say. With `wakes` a request
    wakes an engine that is asleep, so its other half waits, too."""

    queues: Queues
    outputs: Outputs
    wakes = False

    def __init__(self) -> None:
        self.tickets = Tickets()

    def bind(self, queues: Queues, outputs: Outputs) -> None:
        """Set the queues and outputs of the scheduler; to be called once, before anything else."""
        self.queues, self.outputs = queues, outputs

    # -- what the scheduler tells ---------------------------------------------------------------------------------

    def admit(self, req: Request) -> None:
        """Refuse a new request, or limit it to the part that is computed here."""

    def enqueue(self, req: Request, now: float) -> None:
        """Place a new request: into the waiting queue, or where the role lets it wait for its other half."""
        self.queues.enqueue(req)

    def before_plan(self, now: float) -> None:
        """Prepare the plan of a step; called only if requests are pending or transferring."""

    def most_drafts(self, reqs: Sequence[Request], most: Ids) -> Ids:
        """Limit `most` draft tokens of each of these requests, which a step decodes, to those that the device can
        have."""
        return most

    @property
    def has_arrivals(self) -> bool:
        """Whether a request that holds memory starts to run as soon as another one stops."""
        return False

    def computed(self, req: Request) -> None:
        """A step has committed that computed some of a prompt with another half, and the cache has adopted of it."""

    def defer_end(self, req: Request, reason: FinishReason, update: Update | None) -> bool:
        """Return whether the end of this request is deferred: the role records it once the transfer has completed."""
        return False

    def ended(self, req: Request, failure: Failure | None) -> None:
        """Handle the end of a request; its memory is released next."""

    def overdue(self, req: Request, now: float) -> ForebayError | None:
        """Why a request has to end by now that waits for another engine."""
        return None

    def expire(self, now: float) -> None:
        """Drop offers without a request, and the like, after their deadline."""

    def drain(self) -> None:
        """End the waiting requests that could not end while no request is admitted, so that memory can be released or
        weights can change. To be called before each step until no request runs."""

    def resume(self) -> None:
        """Requests are admitted again."""

    def start_over(self, *, cleared: bool) -> None:
        """Handle a failed step: no request runs. With `cleared` no request holds memory either."""

    # -- tickets ---------------------------------------------------------------------------------------------------

    def take(self, event: Event, now: float) -> None:
        """Something has happened to a transfer. What that means for requests is among the scheduler's updates."""
        if self.queues.journal is not None:
            self.queues.journal(Transferred.of(event, now))
        open_ticket = self.tickets.open.get(event.ticket)
        if open_ticket and isinstance(event, Closed):
            self._close(open_ticket, now)
        else:
            self._take(event, open_ticket, now)

    def _take(self, event: Event, open_ticket: OpenTicket | None, now: float) -> None:
        """Handle an event of a ticket that is open here, or of an unknown one."""

    def _close(self, open_ticket: OpenTicket, now: float) -> None:
        self.tickets.close(open_ticket)
        self.queues.pools.deferred.drain()

    def _fail(self, open_ticket: OpenTicket, failure: Failure) -> None:
        """Fail a ticket that cannot be completed, and its request."""
        open_ticket.settled = True
        if open_ticket.req:
            self.outputs.finish(open_ticket.req, FinishReason.ERROR, failure)


class Role(Handoff, ABC):
    """The role of an engine that computes one half of requests. A room is a label: only one living request is in it
    (`_rooms`)."""

    def __init__(self, options: DisaggregationOptions) -> None:
        super().__init__()
        self._options = options
        self._rooms: dict[object, Request] = {}
        self._of: dict[int, OpenTicket] = {}  # by the id of a request that waits for it
        self.spare: SparePlaces

    def bind(self, queues: Queues, outputs: Outputs) -> None:
        super().bind(queues, outputs)
        self.spare = SparePlaces(queues, self.tickets)

    @abstractmethod
    def _room(self, rendezvous: Rendezvous) -> object:
        """Return the key that only one living request may have."""

    def admit(self, req: Request) -> None:
        """Record the digest of the prompt, which later has ids of this engine for pictures; refuse a room in use."""
        where = req.rendezvous
        if where:
            req.prompt_digest = digest_of(req.tokens)
        if where and req.params.pooling:
            raise InvalidRequest("a prompt that is pooled is computed here alone: leave it out", param="bootstrap_room")
        if where and (other := self._rooms.get(self._room(where))):
            raise InvalidRequest(
                f"bootstrap_room {where.room} is in use, by {other}: choose another number for each request",
                code="room_in_use",
                param="bootstrap_room",
            )

    def ended(self, req: Request, failure: Failure | None) -> None:
        if req.rendezvous:
            self._rooms.pop(self._room(req.rendezvous), None)
        open_ticket = self._of.pop(req.id, None)
        if open_ticket:
            open_ticket.req = None
            if not open_ticket.settled:
                self.tickets.withdraw(open_ticket.ticket, failure or ABORTED)

    def drain(self) -> None:
        """End the requests that wait with an open ticket, since they would keep it for as long as they wait."""
        for req in [req for req in self.queues.waiting if req.id in self._of]:
            self.outputs.finish(req, FinishReason.ERROR, ASLEEP)

    @property
    def _resting(self) -> bool:
        """Whether requests with another half must be sent to another engine."""
        return not (self.queues.admits or self.wakes)

    def _begin(self, open_ticket: OpenTicket, req: Request) -> None:
        self.tickets.begin(open_ticket)
        self._of[req.id] = open_ticket
