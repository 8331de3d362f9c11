"""Why requests of a pair of engines fail: each failure needs a fault, a limit or an abort of the same run as its cause.

One `Causes` watches one engine. It sees the events that the engine takes and the orders that it gives, and decides
from these alone which failures a request may end with, and which failures the engine may report to its peer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.config.engine_config import SchedulerConfig
from forebay.requests.request import Request
from forebay.requests.transfers import (
    NO_ADAPTER,
    AdapterIdentity,
    Arrived,
    Broken,
    Closed,
    Decline,
    Event,
    Offer,
    Offered,
    Order,
    Sent,
    Ticket,
    Withdraw,
    digest_of,
)
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.handoff import ABORTED, ASLEEP, LOST
from tests.simulation.liveness import require

if TYPE_CHECKING:
    from forebay.scheduler.scheduler import Scheduler

_Prompt = tuple[int, int, bytes]
"""A room, and the length and digest of a prompt: these identify a request on either engine."""


@dataclass(slots=True)
class Part:
    """One engine's half of a request. `causes` are the failures that something in this run explains."""

    request_id: int
    prompt: _Prompt
    adapter: AdapterIdentity = NO_ADAPTER
    pictures: tuple[bytes, ...] = ()  # digests
    causes: list[Failure] = field(default_factory=list)
    offered: bool = False  # by decode
    settled: bool = False  # its transfer came to its end: what breaks later is of no interest
    finish: FinishReason | None = None
    failure: Failure | None = None

    def reports(self, failure: Failure) -> bool:
        """Whether the end of this half is what `failure` tells the peer."""
        return self.finish is not None and failure == (self.failure or ABORTED)


@dataclass(slots=True)
class _Heard:
    """An offer that prefill heard, and when."""

    offered: Offered
    at: float


class Causes:
    """`now` and `is_altered` (a ticket whose tail the wire altered) belong to the simulation."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler, now: Callable[[], float]) -> None:
        self._config, self._scheduler, self._now = config, scheduler, now
        self._decodes = config.disaggregation.is_decode
        self._parts: dict[int, Part] = {}
        self._of_nonce: dict[bytes, Part] = {}
        self._of_prompt: dict[_Prompt, Part] = {}
        self._offers: dict[Ticket, _Heard] = {}
        self._refused: set[Ticket] = set()  # by prefill: the second delivery of such an offer leads to nothing
        self._untold: dict[int, Part] = {}  # ended, and the peer has to be told in the same call
        self.is_altered: Callable[[Ticket], bool] = lambda ticket: False
        self.expires = False  # an `expire` is under way: `Liveness` checks exactly who may end
        self.rested = False  # the engine has halted since the orders were last taken, and may have gone on
        self.cleared = False  # the ledgers were damaged and are cleared: decode gives up its open transfers

    # -- requests --------------------------------------------------------------------------------------------------

    def added(self, req: Request, tokens: Sequence[int]) -> None:
        """A request is admitted, whose prompt came as `tokens`."""
        if req.rendezvous is None:
            return
        prompt = (req.rendezvous.room, req.num_prompt, digest_of(array("i", tokens)))
        adapter = AdapterIdentity(req.adapter.name, req.adapter.digest) if req.adapter else NO_ADAPTER
        pictures = tuple(its.digest for its in req.pictures.encodings) if req.pictures else ()
        part = self._parts[req.id] = self._of_prompt[prompt] = Part(req.id, prompt, adapter, pictures)
        if self._decodes:
            self._of_nonce[req.rendezvous.nonce] = part
        for heard in self._offers.values():
            if _prompt_of(heard.offered) == prompt:
                self._offer_causes(part, heard.offered)

    def damaged(self) -> None:
        """The ledgers are damaged, and are about to be cleared: what decode has offered is withdrawn."""
        self.cleared = True
        for part in self._parts.values():
            if part.offered and not part.settled and part.finish is None:
                self._untold[part.request_id] = part

    def explain(self, request_id: int, failure: Failure) -> bool:
        """Whether something in this run explains that the request ends with `failure`."""
        if self.expires and (failure.kind == "RequestTimeout" or failure.code == "asleep"):
            return True
        part = self._parts.get(request_id)
        if part is None:
            return False
        return failure in part.causes or (failure == ASLEEP and self._resting)

    def ended(self, update: Update) -> None:
        part = self._parts.get(update.request_id)
        if part is None:
            return
        part.finish, part.failure = update.finish, update.failure
        known = self._decodes or any(_prompt_of(heard.offered) == part.prompt for heard in self._offers.values())
        if known and not part.settled:
            self._untold[part.request_id] = part

    # -- events ----------------------------------------------------------------------------------------------------

    def hears(self, event: Event) -> Part | None:
        """Note what `event` may cause. Returns the request that must have ended once the engine has taken it."""
        if isinstance(event, Offered):
            part = self._of_prompt.get(_prompt_of(event))
            self._offers.setdefault(event.ticket, _Heard(event, self._now()))
            if part:
                self._offer_causes(part, event)
            return part if event.declined and part and self._scheduler.queues.admits else None
        part = self._of(event.ticket)
        match event:
            case Broken() if part and not part.settled:
                part.causes.append(event.failure)
                part.settled = True
                return part
            case Arrived() if part and not part.settled and self.is_altered(event.ticket):
                what = f"{event.tail.num_tokens} tokens were sent of a prompt of {part.prompt[1]}"
                part.causes.append(Failure("EngineError", "transfer_lost", what))
                part.settled = True
                return part
            case Closed() if part and not part.settled and event.ticket in self._refused:
                part.causes.append(LOST)
                part.settled = True
                return part
            case Arrived() | Sent() if part:
                part.settled = True
            case Broken() | Closed():  # of an offer whose request has not come, or of one that ended
                self._offers.pop(event.ticket, None)
        return None

    def taken(self, ended: Part | None, event: Event) -> None:
        require(ended is None or ended.finish is not None, f"{ended} lives on behind {event}")

    def _offer_causes(self, part: Part, offered: Offered) -> None:
        version = self._scheduler.queues.weight_version
        if offered.declined:
            part.causes.append(offered.declined)
            part.settled = True
        elif offered.weight_version != version:
            part.causes.append(_other_weights(version, offered.weight_version))
        elif offered.adapter != part.adapter:
            part.causes.append(_other_adapter(str(part.adapter), offered.adapter))
        elif offered.pictures != part.pictures:
            part.causes.append(_other_pictures(part.pictures, offered.pictures))

    def _of(self, ticket: Ticket) -> Part | None:
        if self._decodes:
            return self._of_nonce.get(ticket.nonce)
        heard = self._offers.get(ticket)
        return self._of_prompt.get(_prompt_of(heard.offered)) if heard else None

    # -- orders ----------------------------------------------------------------------------------------------------

    def ordered(self, order: Order) -> None:
        """What the engine tells its peer of a failure must be so."""
        if isinstance(order, Offer):
            offered = self._of_nonce[order.ticket.nonce]
            require(order.adapter == offered.adapter, f"{offered} is offered with {order.adapter}")
            require(order.pictures == offered.pictures, f"{offered} is offered with {order.pictures}")
            offered.offered = True
        if not isinstance(order, Withdraw | Decline):
            return
        part, failure = self._of(order.ticket), order.failure
        if part:
            self._untold.pop(part.request_id, None)
        reported = part is not None and part.reports(failure)
        if not reported and failure == ASLEEP:
            reported = self._resting
        if not reported and self._decodes and self.cleared and part and failure == LOST:
            reported = part.settled = True  # the request goes on here
        if not reported and not self._decodes:
            reported = self._refuses(order.ticket, part, failure)
        require(reported, f"the peer is told {failure} of {order.ticket}, and {part} is not the cause")
        if not self._decodes:
            self._offers.pop(order.ticket, None)
            self._refused.add(order.ticket)

    def all_told(self) -> None:
        """Call once the orders of a call were taken."""
        require(not self._untold, f"the peer is not told that {self._untold} ended")

    @property
    def _resting(self) -> bool:
        return self.rested or not self._scheduler.queues.admits

    def _refuses(self, ticket: Ticket, part: Part | None, failure: Failure) -> bool:
        """Whether prefill has a reason of its own to refuse an offer."""
        heard, version = self._offers.get(ticket), self._scheduler.queues.weight_version
        if heard is None:
            return False
        if failure == _other_weights(version, heard.offered.weight_version):
            return heard.offered.weight_version != version
        theirs = heard.offered.adapter
        if failure == _no_adapter(theirs.name):
            return theirs.name not in {adapter.name for adapter in self._scheduler.pools.adapters}
        limits, config = self._config.disaggregation, self._config
        most = config.max_running_requests + config.max_queued_requests
        late = self._now() - heard.at > limits.bootstrap_timeout_s
        crowded = len(self._offers) > most
        return failure.code == "bootstrap_timeout" and (part is None or part.finish is not None) and (late or crowded)


def _prompt_of(offered: Offered) -> _Prompt:
    return offered.ticket.room, offered.num_tokens, offered.digest


def _other_weights(ours: int, theirs: int) -> Failure:
    what = f"prefill and decode do not fit together: weight_version: prefill has {ours}, decode {theirs}"
    return Failure("Unavailable", "layout_mismatch", what)


def _no_adapter(name: str) -> Failure:
    what = f"the adapter {name!a} is not loaded on the prefill server: load it on both"
    return Failure("NotFound", "model_not_found", what, "model")


def _other_adapter(ours: str, theirs: AdapterIdentity) -> Failure:
    what = f"adapter: prefill has {ours}, decode {theirs}: load the same files on both"
    return Failure("Unavailable", "adapter_mismatch", f"prefill and decode do not fit together: {what}")


def _other_pictures(ours: Sequence[bytes], theirs: Sequence[bytes]) -> Failure:
    """Both sides have as many pictures, of the same places in the prompt."""
    number = [one == other for one, other in zip(ours, theirs, strict=True)].index(False) + 1
    what = f"image {number} of {len(ours)} has other pixels on the prefill server than on the decode server"
    return Failure(
        "Unavailable", "images_differ", f"{what}: send images as data, or by URLs that answer alike each time"
    )
