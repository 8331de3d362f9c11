"""The transfers of a recorded engine with a role, on its small model: the other engine is a request that runs alone.

Each transfer is as late as its events allow, so that places which are freed or read too early differ. What decode gets
is computed alone, and is written when the ticket is closed; places of a transfer that failed are poisoned then. What
prefill has sent is read when decode says that all has arrived, and a request alone goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from forebay.engine.recorder.alone import Alone
from forebay.engine.recorder.small_engine import VOCAB, Chosen, SmallEngine
from forebay.memory.kv_allocator import KV
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.transfers import Arrived, Closed, Event, Offered, Sent, Ticket
from forebay.scheduler.journal import Added
from forebay.scheduler.offers import Receiving
from forebay.scheduler.scheduler import Scheduler
from forebay.scheduler.tickets import OpenTicket


class FirstToken(NamedTuple):
    """The first token of a request, which another engine chose for this position."""

    request: int
    position: int
    token: int


class SentPrompt(NamedTuple):
    """The choices at a position of a request: behind what was sent of its prompt, and for the request alone."""

    request: int
    position: int
    sent: Chosen
    alone: Chosen


class SmallTransfers:
    """Executes the transfers of one recorded engine. `added` are its requests by id."""

    def __init__(self, scheduler: Scheduler, engine: SmallEngine, alone: Alone, added: Mapping[int, Added]) -> None:
        self._scheduler, self._engine, self._alone, self._added = scheduler, engine, alone, added
        self._starts: dict[Ticket, int] = {}  # of offers to prefill

    def before(self, event: Event) -> FirstToken | SentPrompt | None:
        """Execute what happens before the scheduler takes an event."""
        if isinstance(event, Offered):
            self._starts[event.ticket] = event.start
        open_ticket = self._scheduler.handoff.tickets.open.get(event.ticket)
        if open_ticket is None:
            return None
        if isinstance(event, Closed) and type(open_ticket) in (OpenTicket, Receiving):
            self._write(open_ticket)  # of prefill nothing is written but what a check has set aside
        return None if open_ticket.req is None else self._of_request(event, open_ticket, open_ticket.req)

    def _of_request(self, event: Event, open_ticket: OpenTicket, req: Request) -> FirstToken | SentPrompt | None:
        if isinstance(event, Arrived):
            return FirstToken(req.id, req.num_prompt, event.tail.token_id % VOCAB)
        if isinstance(event, Sent) and open_ticket.whole:
            return self._read(open_ticket, req)
        return None

    def _read(self, sending: OpenTicket, req: Request) -> SentPrompt:
        """Let a request alone go on from all that was sent of one."""
        prompt, pictures = request_of(self._added[req.id])
        page_size = self._scheduler.config.page_size
        asked = prompt, req.tokens[-1] % VOCAB, pictures, self._starts[sending.ticket] // page_size * page_size
        sent = self._alone.behind(*asked, [(spans, self._engine.read(spans)) for spans in sending.named])
        alone = self._alone.behind(*asked, None)
        return SentPrompt(req.id, len(prompt) + 1, sent, alone)

    def _write(self, receiving: OpenTicket) -> None:
        """Write what decode waits for; poison the places of what has not arrived, and those of a check."""
        for spans in receiving.named:
            self._engine.poison(spans)
        req, tail = receiving.req, receiving.tail if isinstance(receiving, Receiving) else None
        if req is None or tail is None:
            return
        prompt, pictures = request_of(self._added[req.id])
        for spans in receiving.named:
            sent = self._alone.caches(prompt, tail.token_id % VOCAB, pictures, spans[KV].start)
            self._engine.write(spans, *sent)


def request_of(added: Added) -> tuple[list[int], list[Picture]]:
    """Return the prompt and the pictures of a request."""
    return memoryview(added.tokens).cast("i").tolist(), [shown.picture() for shown in added.pictures]
