"""The servers behind the router with their connections, and the health checks of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.base.http_client import Origin
from forebay.base.proof import BOOTSTRAP, PROOF, Message, digest_of, prove
from forebay.route.announcement import Role
from forebay.route.hops import loop_of
from forebay.route.membership import MemberRecord, Membership
from forebay.route.selection import Selected, Selection, is_ready, select_for_answer, select_for_prompt
from forebay.route.upstream import Pool

CHECK_INTERVAL_S: Final = 1.0
CHECK_TIMEOUT_S: Final = 2.0
INFO_TIMEOUT_S: Final = 1.0  # of a server that is up: the other checks wait for it
CHECKS_PER_INFO: Final = 5  # /server_info, whose weight version may change, is read with one check in so many
GIVEN_UP_AFTER: Final = 3  # failed checks in a row, after which the requests at a server fail
HOLD_S: Final = 10.0  # a server is back after a crash, or a pair after an update of its weights, within that
EMPTY: Final = digest_of(b"")
NONE: Final[Mapping[str, str]] = MappingProxyType({})
_NOT_TRUSTED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Reasons of /ready with which requests that run come to their end, if later.
_WELL_BUT_BUSY: Final = ("draining", "queue_full", "asleep", "waking")


@dataclass(eq=False, slots=True, kw_only=True)
class Member(MemberRecord):
    """One server with the connections to it."""

    pool: Pool
    cluster_key: bytes = field(default=b"", repr=False)
    num_stuck: int = 0  # failed checks in a row
    checks_to_info: int = 0

    @property
    def bootstrap_port(self) -> int:
        return int(self.info.get("disaggregation_bootstrap_port") or 0)

    def proof(
        self, method: str, target: str, bootstrap: Mapping[str, str] = NONE, digest: str = EMPTY
    ) -> dict[str, str]:
        """Return the headers `bootstrap` with the proof for one message to this member, if the router has the key."""
        if not self.cluster_key:
            return dict(bootstrap)
        message = Message(method=method, target=target, host=self.pool.origin.authority, bootstrap=bootstrap)
        return {**bootstrap, PROOF: prove(self.cluster_key, message, digest)}

    def check_headers(self, path: str, bootstrap: Mapping[str, str] = NONE) -> dict[str, str]:
        """Return the headers for a check of this member. An announced one, whose URL no operator has written, gets no
        key of a user but a proof of the cluster key."""
        key = self.pool.origin.api_key
        if not self.is_configured and key:
            return self.proof("GET", path, bootstrap)
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        return {**authorization, **(self.proof("GET", path, bootstrap) if bootstrap else {})}


class Members(Membership[Member]):
    """All servers. Belongs to one event loop. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        urls: Mapping[Role, Sequence[str]],
        *,
        api_key: str = "",
        cluster_key: bytes = b"",
        selection: Selection | None = None,
        hold_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self._member)
        self.router_id = secrets.token_hex(16)  # of this start of the router
        self._api_key, self._clock = api_key, clock
        self._cluster_key = cluster_key
        self._selection = selection or Selection()
        self.health = HealthChecks(self, hold_s)
        for role, found in urls.items():
            for url in found:
                self.configure(url, role)

    def _member(self, url: str, role: Role, is_configured: bool) -> Member:
        pool = Pool(Origin(url, self._api_key))
        return Member(url=url, role=role, is_configured=is_configured, pool=pool, cluster_key=self._cluster_key)

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def ready(self) -> bool:
        return is_ready(self, self.now)

    def select(self, blocks: Sequence[bytes], tried: Collection[Member] = ()) -> Selected[Member]:
        """Return the members for a request whose prompt has these blocks. Raises Unavailable."""
        return self._selection.select(self, blocks, self.now, tried)

    def select_for_prompt(self, tried: Collection[Member] = ()) -> Selected[Member]:
        """Return the member for a request that is a prompt alone. Raises Unavailable."""
        return select_for_prompt(self, self.now, tried)

    def select_for_answer(self) -> Member:
        """Return a member for a question about the model. Raises Unavailable."""
        return select_for_answer(self, self.now)

    def retire(self, member: Member) -> None:
        """Close the idle connections to a member that was dropped."""
        member.pool.retire()

    def close(self) -> None:
        """Close all connections."""
        for member in self.all:
            member.pool.close()


class HealthChecks:
    """The health checks of a router's members. Belongs to one event loop.

    A request without a usable member may wait for a recovery within `hold_s` after the last time that there was one.
    """

    def __init__(self, members: Members, hold_s: float) -> None:
        self._members, self._hold_s = members, hold_s
        self._ready_at = -math.inf
        self._passed = asyncio.Event()  # set for a moment: a server has passed a check

    def may_recover(self, tried: Collection[Member] = ()) -> bool:
        """Return whether no request would find members now, but one would have within the last `hold_s`. Of members
        that compute whole requests, those of `tried` are of no use again."""
        members = self._members
        is_recent = not members.ready and members.now < self._ready_at + self._hold_s
        return is_recent and any(member.role is not Role.BOTH or member not in tried for member in members.all)

    async def recovery(self) -> None:
        """Wait until a server passes a check, or for the time between two checks."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._passed.wait(), CHECK_INTERVAL_S)

    async def watch(self) -> None:
        """Check all members every `CHECK_INTERVAL_S`, until it is cancelled."""
        while True:
            await self.check_all()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def check_all(self) -> None:
        """Check the health of all servers concurrently."""
        members = self._members
        members.expire(members.now)
        await asyncio.gather(*map(self.check, members.all))
        if members.ready:
            self._ready_at = members.now

    async def check(self, member: Member) -> None:
        """Find out whether a server takes requests. If it has not done so for several checks, fail those at it."""
        try:
            await asyncio.wait_for(self._check(member), CHECK_TIMEOUT_S)
        except TimeoutError:
            self._members.failed_check(member, f"no answer within {CHECK_TIMEOUT_S:g} s")
        except ForebayError as error:
            self._members.failed_check(member, error.message)
        if member.up and member.checks_to_info <= 0:
            with contextlib.suppress(ForebayError, TimeoutError):  # a long step delays it: the next check tries again
                await asyncio.wait_for(self._read_info(member, member.num_downs), INFO_TIMEOUT_S)
        member.num_stuck = 0 if member.up or member.why in _WELL_BUT_BUSY else member.num_stuck + 1
        if member.num_stuck == GIVEN_UP_AFTER:
            member.pool.give_up()
        if member.up:
            self._passed.set()
            self._passed.clear()

    async def check_now(self, member: Member) -> None:
        """Check a server and read its /server_info, which the last request may have changed."""
        member.checks_to_info = 0
        await self.check(member)

    async def _check(self, member: Member) -> None:
        num_downs = member.num_downs
        head, body = await member.pool.ask("GET", "/ready", member.check_headers("/ready"))
        member.checks_to_info -= 1
        if head.status in _NOT_TRUSTED:
            self._members.failed_check(member, _refusal(member, head.status, body))
        elif head.status != 200:
            self._members.failed_check(member, str(as_object(body).get("reason", f"HTTP {head.status}")))
        elif not member.up:
            await self._read_info(member, num_downs)

    async def _read_info(self, member: Member, num_downs: int) -> None:
        # A pair's headers are refused here if requests with them would be.
        probe = {} if member.role is Role.BOTH else {f"{BOOTSTRAP}room": "0"}
        head, body = await member.pool.ask("GET", "/server_info", member.check_headers("/server_info", probe))
        info = as_object(body) if head.status == 200 else {}
        mode = info.get("disaggregation_mode")
        if loop := loop_of(self._members.router_id, info):
            self._members.failed_check(member, f"{loop}: leave it out of this router's servers")
        elif head.status in _NOT_TRUSTED:
            self._members.failed_check(member, _refusal(member, head.status, body))
        elif Role.of(mode) is not member.role:
            self._members.failed_check(member, f"it is no {member.role.noun}: its --disaggregation-mode is {mode}")
        else:
            member.checks_to_info = CHECKS_PER_INFO
            self._members.checked(member, info, num_downs)


def _refusal(member: Member, status: int, body: bytes) -> str:
    error = as_object(body).get("error")
    said = str(error.get("message", ""))[:300] if isinstance(error, dict) else ""
    shared = "--api-key-file" if status == HTTPStatus.UNAUTHORIZED and member.is_configured else "--cluster-key-file"
    return f"it refuses this router (HTTP {status}: {said}): give both the same {shared}"


def as_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object, an empty one for any other value."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
