"""The servers behind the router: who is up, how much each has to do, and who is to have the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from forebay.base.errors import ForebayError, Unavailable
from forebay.base.http_client import Origin
from forebay.base.log import event, get_logger
from forebay.config.engine_config import DisaggregationMode
from forebay.route.prefixes import Prefixes
from forebay.route.upstream import Pool
from forebay.server.http.security import BOOTSTRAP, PROOF, proof_of

CHECK_INTERVAL_S: Final = 1.0
CHECK_TIMEOUT_S: Final = 2.0
GIVEN_UP_AFTER: Final = 3  # checks that find nobody at work: whoever waits for this server waits in vain
# Reasons of /ready with which what is there comes to its end, if later.
_WELL_BUT_BUSY: Final = ("draining", "queue_full", "asleep", "waking")
# A cached beginning is worth waiting for: so many requests more than the least busy server has.
WORTH_WAITING: Final = 8

log = get_logger("route")


@dataclass(eq=False, slots=True)
class Member:
    """One server. `info` is what its /server_info said when it came up."""

    role: DisaggregationMode
    pool: Pool
    proof: Mapping[str, str]  # that we have the cluster key
    up: bool = False
    why: str = "not asked yet"  # where it is not up
    info: dict[str, Any] = field(default_factory=dict)
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0
    num_stuck: int = 0  # checks in a row that found nobody at work

    @property
    def name(self) -> str:
        return str(self.pool.origin)

    @property
    def bootstrap_port(self) -> int:
        return int(self.info.get("disaggregation_bootstrap_port") or 0)

    def failed(self, why: str) -> None:
        """Mark the member as failed: it gets no request until a check succeeds."""
        self.num_failures += 1
        self.down(why)

    def down(self, why: str) -> None:
        """Mark the server as down until its next successful check."""
        if self.up:
            log.warning(event("member_down", role=self.role, at=self.name, why=why))
        self.up, self.why = False, why

    def headers(self) -> dict[str, str]:
        """Return the authorization header for requests to this server."""
        key = self.pool.origin.api_key
        return {"authorization": f"Bearer {key}"} if key else {}

    async def check(self) -> None:
        """Find out whether it would take a request. Requests at one that does nothing for long are given up."""
        try:
            await asyncio.wait_for(self._check(), CHECK_TIMEOUT_S)
        except TimeoutError:
            self.down(f"no answer within {CHECK_TIMEOUT_S:g} s")
        except ForebayError as error:
            self.down(error.message)
        self.num_stuck = 0 if self.up or self.why in _WELL_BUT_BUSY else self.num_stuck + 1
        if self.num_stuck == GIVEN_UP_AFTER:
            self.pool.give_up()

    async def _check(self) -> None:
        head, body = await self.pool.ask("GET", "/ready", self.headers())
        if head.status != 200:
            self.down(str(as_object(body).get("reason", f"HTTP {head.status}")))
        elif not self.up:
            probe = {**self.headers(), **self.proof, f"{BOOTSTRAP}room": "0"}  # refused where requests would be
            head, body = await self.pool.ask("GET", "/server_info", probe)
            if head.status == 403:
                self.down("it refuses this router's headers: give both the same --cluster-key-file")
            else:
                self._came_up(as_object(body) if head.status == 200 else {})

    def _came_up(self, info: dict[str, Any]) -> None:
        role = info.get("disaggregation_mode")
        if role != self.role:
            self.down(f"it is no {self.role} server: its --disaggregation-mode is {role}")
            return
        self.info, self.up, self.why = info, True, ""
        log.info(event("member_up", role=self.role, at=self.name, model=info.get("served_model_name")))

    def as_dict(self) -> dict[str, Any]:
        """Return the server's state for /state."""
        return {
            "url": self.name,
            "role": self.role,
            "up": self.up,
            "why": self.why,
            "in_flight": self.in_flight,
            "requests": self.num_requests,
            "failures": self.num_failures,
        }


def as_object(body: bytes) -> dict[str, Any]:
    """Empty for what is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


class Members:
    """All of them. Belongs to one event loop."""

    def __init__(self, prefill: Iterable[Origin], decode: Iterable[Origin], cluster_key: bytes = b"") -> None:
        proof = {PROOF: proof_of(cluster_key)} if cluster_key else {}
        self.prefill = [Member(DisaggregationMode.PREFILL, Pool(origin), proof) for origin in prefill]
        self.decode = [Member(DisaggregationMode.DECODE, Pool(origin), proof) for origin in decode]
        self.prefixes = Prefixes()

    @property
    def all(self) -> list[Member]:
        return [*self.prefill, *self.decode]

    @property
    def ready(self) -> bool:
        return any(member.up for member in self.prefill) and any(member.up for member in self.decode)

    def choose_prefill(self, blocks: Sequence[bytes]) -> Member:
        """Return the member with the longest cached prefix of the prompt, unless it is much busier than another. Raises
        Unavailable if none is up."""
        members = _up(self.prefill)
        least = _least_busy(members)
        known = self.prefixes.longest(blocks)
        who = next((member for member in members if member.name == known), least)
        if who.in_flight - least.in_flight >= WORTH_WAITING:
            who = least
        self.prefixes.learn(blocks, who.name)
        return who

    def choose_decode(self) -> Member:
        """Return the least busy member. Raises Unavailable if none is up."""
        return _least_busy(_up(self.decode))

    def lost(self, member: Member, why: str) -> None:
        """Mark a member whose process has ended or does not answer."""
        member.failed(why)
        self.prefixes.forget(member.name)

    async def watch(self) -> None:
        """Check on all of them, for ever."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Check the health of all servers concurrently."""
        await asyncio.gather(*(member.check() for member in self.all))

    def close(self) -> None:
        """Close all idle connections."""
        for member in self.all:
            member.pool.close()


def _up(members: Sequence[Member]) -> list[Member]:
    found = [member for member in members if member.up]
    if not found:
        whys = "; ".join(f"{member.name}: {member.why}" for member in members)
        raise Unavailable(f"no {members[0].role} server is up ({whys})", code=f"no_{members[0].role}_server")
    return found


def _least_busy(members: Sequence[Member]) -> Member:
    return min(members, key=lambda member: (member.in_flight, member.num_requests))
