"""The streams of an engine's requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from forebay.base.errors import Unavailable
from forebay.base.log import event, get_logger
from forebay.engine.frames import Updates
from forebay.engine.stream import Mailbox, Stream, failed

log = get_logger("engine.client")


class Mailboxes:
    """One mailbox for each request that has not ended. `abort` asks the engine to end a request."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._of: dict[int, Mailbox] = {}
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of

    @property
    def tenants(self) -> Iterator[str]:
        """Yield the tenant of each request."""
        return (mailbox.tenant for mailbox in self._of.values())

    def open(self, request_id: int, tenant: str) -> Stream:
        """Return the stream of a request that was sent."""
        mailbox = self._of[request_id] = Mailbox(request_id, tenant)
        return Stream(mailbox, self._abort)

    def deliver(self, frame: Updates) -> None:
        """Put updates into the mailboxes; one that is full is cut."""
        mailboxes = self._of
        for request_id, token_ids in frame.tokens():
            mailbox = mailboxes.get(request_id)
            # None: cut before, its abort is on the way.
            if mailbox is not None and not mailbox.put_tokens(token_ids):
                self._cut(request_id)
        for update in frame.updates:
            mailbox = mailboxes.get(update.request_id)
            if mailbox is None:
                continue
            if not mailbox.put(update):
                self._cut(update.request_id)
            elif mailbox.closed:
                del mailboxes[update.request_id]
        if not mailboxes:
            self._empty.set()

    def _cut(self, request_id: int) -> None:
        """Abort a request whose mailbox was full, which has ended the stream."""
        log.warning(event("slow_consumer_cut", id=request_id))
        self._abort(request_id)
        del self._of[request_id]

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is left, for `timeout_s` at most."""
        self._empty.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)

    def fail(self, reason: Unavailable) -> None:
        """End every stream with an error."""
        for request_id, mailbox in self._of.items():
            mailbox.put(failed(request_id, reason))
        self._of.clear()
        self._empty.set()
