"""Turns at the work before admission (C32, decision 64): parsing, templates, tokenizing, grammars, images.

Each kind of work has a lane: threads, processes or connections of its own, so that no kind waits for another. Tenants
share all lanes by their weights, as they share the engine: the tenant that has been served least is next. A turn is
charged with the seconds that it takes, times the part of its lane.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from starlette.types import Message

from forebay.base.errors import Overloaded
from forebay.base.room import Room
from forebay.http.lifecycle import ClientGone, Watch

MAX_WAITING: Final = 512  # turns that wait in a lane; of a tenant its share, once they are as many
MAX_WAIT_S: Final = 30.0  # of one of them
SPARE: Final = 1  # places of a lane for tenants that have none there
CREDIT_S: Final = 2.0  # by which a tenant that takes a spare place may have been served more than the others there


@dataclass(slots=True, eq=False)
class Client:
    """The client of one request: the tenant that is charged, when the request arrived, and whether the client is still
    there. `num_inline_chars` were tokenized on the event loop for it."""

    watch: Watch
    tenant: str = ""
    arrived_at: float = 0.0
    num_inline_chars: int = 0


def staying_client() -> Client:
    """Return a client that never leaves, for work that no request asked for."""
    return Client(Watch(_never))


async def _never() -> Message:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class _Account:
    """The service of one tenant: `paid` is for turns that have ended. Of those that have begun, `rate` is the sum of
    the parts of lanes that they take, and `unpaid_from` that of these parts times the beginnings."""

    weight: int
    paid: float = 0.0
    rate: float = 0.0
    unpaid_from: float = 0.0
    num_turns: int = 0  # that wait or have begun


class Preparation:
    """The tenants' accounts, which all lanes share. Belongs to one event loop."""

    def __init__(self, weights: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self.weights, self.clock = weights, clock
        self._accounts: dict[str, _Account] = {}  # of tenants that have had a turn

    def lane(self, name: str, width: int, max_waiting: int = MAX_WAITING) -> Lane:
        """Make a lane of `width` places, and `SPARE` more."""
        return Lane(self, name, width, max_waiting)

    def service(self, tenant: str) -> float:
        """Return what a tenant has been served until now, in seconds of whole lanes divided by its weight."""
        account = self._accounts[tenant]
        return account.paid + (account.rate * self.clock() - account.unpaid_from) / account.weight

    def join(self, tenant: str) -> None:
        """Count a turn. A tenant that had none begins level with the one that has been served least of those with
        turns: it has no credit for the time before, and no debt for capacity that no other tenant wanted."""
        account = self._accounts.setdefault(tenant, _Account(self.weights.get(tenant, 1)))
        if not account.num_turns:
            others = [self.service(name) for name, other in self._accounts.items() if other.num_turns]
            account.paid = max(account.paid, min(others) if others else max(a.paid for a in self._accounts.values()))
        account.num_turns += 1

    def begin(self, tenant: str, rate: float) -> float:
        """Charge from now on for a turn that takes `rate` of a lane; return the time."""
        account, now = self._accounts[tenant], self.clock()
        account.rate += rate
        account.unpaid_from += rate * now
        return now

    def end(self, tenant: str, rate: float, began_at: float) -> None:
        """Charge for such a turn, which ends now; `rate` is 0 for one that has not begun."""
        account = self._accounts[tenant]
        account.rate -= rate
        account.unpaid_from -= rate * began_at
        account.paid += rate * (self.clock() - began_at) / account.weight
        account.num_turns -= 1
        if not account.num_turns:
            account.rate = account.unpaid_from = 0.0  # no rounding errors stay


class Lane:
    """Places for one kind of work. Made by `Preparation.lane`.

    A tenant may take all `width` places. If all are taken, a tenant that has none gets a spare one at once, so that
    short work does not wait until another tenant's long work ends; unless it has been served `CREDIT_S` more than those
    that have places. Of one tenant the request that arrived first is next.
    """

    def __init__(self, preparation: Preparation, name: str, width: int, max_waiting: int) -> None:
        self.name, self.num_places = name, width + SPARE
        self._preparation, self._width, self._max_waiting = preparation, width, max_waiting
        self._waiting: dict[str, list[Turn]] = {}  # of each tenant by arrival; no tenant without any
        self._begun: Counter[str] = Counter()
        self._room = Room(preparation.weights)  # for those that wait

    async def turn(self, client: Client) -> Turn:
        """Wait for a place. The caller calls `end` when the work is over. Raises ClientGone if the client leaves, and
        Overloaded if too many turns of its tenant wait or none begins in `MAX_WAIT_S`."""
        if not self._room.has_room(client.tenant, self._max_waiting):
            own = len(self._waiting.get(client.tenant, ()))  # no count of other tenants' requests is told (C29)
            raise Overloaded(f"{own} requests wait for a free {self.name} worker: try again later")
        turn = Turn(self, client.tenant, client.arrived_at)
        self._room.enter(turn.tenant)
        self._preparation.join(turn.tenant)
        insort(self._waiting.setdefault(turn.tenant, []), turn, key=_arrival)
        self._begin_turns()
        try:
            with client.watch.calling(turn.withdraw):
                await asyncio.wait_for(turn.begun, MAX_WAIT_S)
        except BaseException as error:
            turn.end()
            if isinstance(error, TimeoutError):
                raise Overloaded(f"no {self.name} worker came free within {MAX_WAIT_S:g} s: try again later") from None
            raise
        return turn

    def _begin_turns(self) -> None:
        """Begin as many turns as there are places for."""
        while (turn := self._next()) is not None:
            self._remove(turn)
            turn.waits = False
            turn.began_at = self._preparation.begin(turn.tenant, 1 / self._width)
            self._begun[turn.tenant] += 1
            if not turn.begun.done():
                turn.begun.set_result(None)

    def _next(self) -> Turn | None:
        """Return the turn to begin now, if any."""
        num_begun, begun, service = self._begun.total(), self._begun, self._preparation.service
        tenants = [*self._waiting]
        if num_begun >= self._width:
            most = min((service(tenant) for tenant in +begun), default=0.0) + CREDIT_S
            tenants = [tenant for tenant in tenants if not begun[tenant] and service(tenant) <= most]
        if num_begun >= self.num_places or not tenants:
            return None
        return self._waiting[min(tenants, key=lambda tenant: (service(tenant), begun[tenant]))][0]

    def _remove(self, turn: Turn) -> None:
        own = self._waiting[turn.tenant]
        own.remove(turn)
        if not own:
            del self._waiting[turn.tenant]
        self._room.leave(turn.tenant)

    def end(self, turn: Turn) -> None:
        """Take back the place of a turn, or remove the turn if it has none; begin others."""
        rate = 0.0
        if turn.waits:
            self._remove(turn)
        else:
            rate = 1 / self._width
            self._begun[turn.tenant] -= 1
        self._preparation.end(turn.tenant, rate, turn.began_at)
        self._begin_turns()


@dataclass(slots=True, eq=False)
class Turn:
    """A place in a lane, or the wait for one. Made by `Lane.turn`."""

    lane: Lane
    tenant: str
    arrived_at: float
    begun: asyncio.Future[None] = field(default_factory=asyncio.Future)
    began_at: float = 0.0
    waits: bool = True
    over: bool = False

    def withdraw(self) -> None:
        """Stop waiting, if it waits: the client is gone."""
        if not self.begun.done():
            self.begun.set_exception(ClientGone())
            self.end()

    def end(self) -> None:
        """Free the place; no-op after the first call."""
        if not self.over:
            self.over = True
            self.lane.end(self)


_arrival: Final = attrgetter("arrived_at")
