"""The prefix table of the active router at a standby router: what one learns is sent to the other, in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from forebay.base.errors import ForebayError, Unavailable
from forebay.base.http_client import Origin
from forebay.base.log import event, get_logger
from forebay.base.proof import PROOF, Message, digest_of, prove
from forebay.route.announcement import MAX_URL_CHARS
from forebay.route.hops import VIA
from forebay.route.prefixes import MOST_BLOCKS, Prefixes
from forebay.route.upstream import Pool

PREFIXES_PATH: Final = "/members/prefixes"
MOST_WAITING: Final = 4096  # changes; more are dropped, and the whole table is sent
MOST_PER_BATCH: Final = 64  # of at most `MOST_BLOCKS` blocks each: 1.1 MB
BATCH_S: Final = 0.1
HEARTBEAT_S: Final = 3.0  # without changes; the answer shows whether the standby was started again
RETRY_S: Final = 1.0
POST_TIMEOUT_S: Final = 5.0

log = get_logger("route")


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A member's blocks (hexadecimal digests, shortest beginning first); `continues` if a prompt continues after the
    last one. Without any block, the member has none any more."""

    url: Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS)]
    blocks: Annotated[
        list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]], msgspec.Meta(max_length=MOST_BLOCKS)
    ] = []
    continues: bool = msgspec.field(default=False, name="goes_on")  # the name between routers of other versions, too


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes in order; `begins_anew` if the receiver must drop its table first."""

    begins_anew: bool
    changes: Annotated[list[Change], msgspec.Meta(max_length=MOST_PER_BATCH)]

    def apply(self, prefixes: Prefixes) -> None:
        """Apply the changes to a table. Its observer is not called, since two routers may be each other's standby."""
        if self.begins_anew:
            prefixes.clear()
        for change in self.changes:
            if change.blocks:
                blocks = [bytes.fromhex(block) for block in change.blocks]
                prefixes.record(blocks, change.url, continues=change.continues)
            else:
                prefixes.drop(change.url)


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a batch. `router` is another for each start of the receiver."""

    router: str


class CountsDropped(Protocol):
    """A counter of changes that were not sent."""

    def count_dropped(self, num: int) -> None:
        """Count changes."""


class Standby:
    """Observes a prefix table and sends its changes to another router. Belongs to one event loop.

    While the other router is away nothing waits for it: changes are dropped, and afterwards the whole table is sent.
    """

    def __init__(
        self, url: str, prefixes: Prefixes, cluster_key: bytes, metrics: CountsDropped, *, router_id: str
    ) -> None:
        self._pool, self._prefixes, self._metrics = Pool(Origin(url)), prefixes, metrics
        self._cluster_key = cluster_key
        self._headers = {VIA: router_id, "content-type": "application/json"}
        self._waiting: deque[Change] = deque()
        self._changed = asyncio.Event()
        self._receiver = ""  # "": the whole table must be sent
        self._failure = ""
        prefixes.observer = self

    def learned(self, blocks: Sequence[bytes], url: str) -> None:
        """Queue what the table has learned."""
        self._add(Change(url=url, blocks=[block.hex() for block in blocks]))

    def forgot(self, url: str) -> None:
        """Queue the loss of a member's cache."""
        self._add(Change(url=url))

    def _add(self, change: Change) -> None:
        if not self._receiver:
            self._metrics.count_dropped(1)
        elif len(self._waiting) >= MOST_WAITING:
            self._begin_anew("the standby router is too slow", num_dropped=1)
        else:
            self._waiting.append(change)
            self._changed.set()

    def _begin_anew(self, why: str, num_dropped: int = 0) -> None:
        if why != self._failure:  # a router that is away for long is one line
            self._failure = why
            log.warning(event("standby_lost", at=self._pool.origin, why=why))
        self._metrics.count_dropped(num_dropped + len(self._waiting))
        self._receiver = ""
        self._waiting.clear()

    async def run(self) -> None:
        """Send changes, for ever."""
        try:
            while True:
                try:
                    await self._send_due()
                except (ForebayError, TimeoutError, msgspec.DecodeError) as error:
                    self._begin_anew(str(error) or "no answer in time")
                    await asyncio.sleep(RETRY_S)
        finally:
            self._pool.close()

    async def _send_due(self) -> None:
        if not self._receiver:
            await self._send_table()
        if not self._waiting:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
                await asyncio.sleep(BATCH_S)
            except TimeoutError:
                pass
        num = min(len(self._waiting), MOST_PER_BATCH)
        await self._send(Batch(begins_anew=False, changes=[self._waiting.popleft() for _ in range(num)]))

    async def _send_table(self) -> None:
        """Send all entries, in the order in which they would be evicted. Changes meanwhile wait behind them."""
        answer = await self._post(Batch(begins_anew=True, changes=[]))
        self._receiver, self._failure = answer.router, ""
        entries = list(_as_changes(self._prefixes))
        log.info(event("standby_found", at=self._pool.origin, entries=len(self._prefixes)))
        for start in range(0, len(entries), MOST_PER_BATCH):
            await self._send(Batch(begins_anew=False, changes=entries[start : start + MOST_PER_BATCH]))

    async def _send(self, batch: Batch) -> None:
        if (await self._post(batch)).router != self._receiver:
            raise Unavailable("the standby router was started again")

    def _proof(self, content: bytes) -> dict[str, str]:
        if not self._cluster_key:
            return {}
        message = Message(method="POST", target=PREFIXES_PATH, host=self._pool.origin.authority)
        return {PROOF: prove(self._cluster_key, message, digest_of(content))}

    async def _post(self, batch: Batch) -> Received:
        content = msgspec.json.encode(batch)
        asked = self._pool.ask("POST", PREFIXES_PATH, {**self._headers, **self._proof(content)}, content)
        head, body = await asyncio.wait_for(asked, POST_TIMEOUT_S)
        if head.status != 200:
            raise Unavailable(f"it answered HTTP {head.status}: {body[:200].decode(errors='replace')}")
        return msgspec.json.decode(body, type=Received)


def _as_changes(prefixes: Prefixes) -> Iterator[Change]:
    """Yield the table as changes that restore it, with the order of eviction."""
    run: list[tuple[str, bytes, bool]] = []
    for entry in prefixes.entries():
        url, _, continues = entry
        if run and (url != run[0][0] or not continues or len(run) == MOST_BLOCKS):
            yield _as_change(run)
            run = []
        run.append(entry)
    if run:
        yield _as_change(run)


def _as_change(run: Sequence[tuple[str, bytes, bool]]) -> Change:
    """Return the change for entries of one member, of which a prompt may end behind the first one alone."""
    url, _, continues = run[0]
    return Change(url=url, blocks=[block.hex() for _, block, _ in reversed(run)], continues=continues)
