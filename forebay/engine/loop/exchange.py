"""Events from the KV transfer to a scheduler with a role, and orders from the scheduler to the transfer."""

from __future__ import annotations

import secrets
from typing import Protocol

import msgspec

from forebay.engine.frames import Transferring
from forebay.engine.loop.checks import Checks, Patterned
from forebay.requests.transfers import NONCE_BYTES, Rendezvous, Transfers
from forebay.scheduler.scheduler import Scheduler


class Connected(Transfers, Patterned, Protocol):
    """Transfers of a process: `fileno` is readable while there are events."""

    @property
    def num_unfenced(self) -> int:
        """Broken tickets whose places a peer may still write to."""
        ...

    @property
    def num_rejected(self) -> int:
        """Sessions that ended because a peer's message could not be handled."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable when events wait, for select."""

    def weights_changed(self, path: str | None, version: int) -> None:
        """Announce weights of this version, those at `path`, for all that is computed from now on. No ticket is
        open."""
        ...


class Exchange:
    """Owned by the engine's thread; neither call waits."""

    def __init__(self, scheduler: Scheduler, transfers: Connected) -> None:
        self._scheduler, self.transfers = scheduler, transfers
        self._offers = scheduler.config.disaggregation.is_decode
        self.checks = Checks(scheduler, transfers)

    def with_nonce(self, wanted: Rendezvous | None) -> Rendezvous | None:
        """On decode: rooms may come twice, nonces do not."""
        if wanted is None or not self._offers:
            return wanted
        return msgspec.structs.replace(wanted, nonce=secrets.token_bytes(NONCE_BYTES))

    def handle_events(self, now: float) -> bool:
        """Pass the events of the transfers to the scheduler; return whether there were any. Raises EngineError if the
        transfers have failed for good."""
        events = self.transfers.poll()
        for happened in events:
            if not self.checks.take(happened, now):
                self._scheduler.handoff.take(happened, now)
        self.checks.expire(now)
        return bool(events)

    def submit_orders(self) -> None:
        """Submit the orders that the scheduler has written since the last call."""
        for order in self._scheduler.handoff.tickets.take_orders():
            self.transfers.submit(order)

    def weights_changed(self, path: str | None, version: int) -> None:
        """Inform the transfers of other weights, after the orders that were decided with the old ones. `path` None:
        tensors from memory."""
        self.submit_orders()
        self.transfers.weights_changed(path, version)

    def state(self) -> Transferring:
        """Return the counts of requests on their way and of open transfers, for metrics and `/debug/state`."""
        queues = self._scheduler.queues
        return Transferring(
            pending=len(queues.pending),
            transferring=len(queues.transferring),
            open=self._scheduler.handoff.tickets.num_open,
            unfenced=self.transfers.num_unfenced,
            rejected=self.transfers.num_rejected,
        )
