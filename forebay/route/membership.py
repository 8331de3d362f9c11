"""The members of a router: what the command line, announcements and health checks say of each.

No I/O and no clock: times are arguments, in seconds of one monotonic clock, so that a simulator runs this code.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from forebay.base.errors import ConfigError, Conflict, InvalidRequest, Overloaded
from forebay.base.http_client import Origin
from forebay.base.log import event, get_logger
from forebay.route.announcement import LEASE_S, Announcement, Role, State
from forebay.route.prefixes import Prefixes

FORGET_S: Final = 60.0  # for so long a member without a lease is still listed
MOST_MEMBERS: Final = 1024
MOST_INSTANCES: Final = 4096  # that are remembered
NOT_CHECKED: Final = "not checked yet"

log = get_logger("route")


@dataclass(eq=False, slots=True, kw_only=True)
class MemberRecord:
    """One server, as the router knows it. `info` is its last /server_info."""

    url: str
    role: Role
    is_configured: bool  # by its URL on the command line
    announced: Announcement | None = None  # None: known from the command line alone
    lease_ends: float = math.inf
    up: bool = False  # by the last health check, and no connection has failed since
    why: str = NOT_CHECKED  # if it is not up
    num_downs: int = 0  # times that it was found to be down
    info: dict[str, Any] = field(default_factory=dict)
    in_flight: int = 0
    num_requests: int = 0
    num_failures: int = 0
    last_selected: int = 0  # the number of the selection

    @property
    def version(self) -> tuple[str, str]:
        """The weight version as announced, and the server's own count of updates. Prefill and decode must agree in
        both."""
        return self.announced.weight_version if self.announced else "", str(self.info.get("weight_version", ""))

    def obstacle(self, now: float) -> str:
        """Return why the member gets no new request, or ""."""
        if self.announced is not None:
            if self.announced.state is not State.READY:
                return f"it is {self.announced.state}"
            if now >= self.lease_ends:
                return f"its lease of {LEASE_S:g} s has expired: no announcement came"
        return "" if self.up else self.why or "it is down"

    def down(self, why: str) -> None:
        """Mark the server as down until its next successful check."""
        if self.up:
            log.warning(event("member_down", role=self.role, at=self.url, why=why))
        self.up, self.why = False, why
        self.num_downs += 1

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the member's state for /server_info and `GET /members`."""
        announced = self.announced
        obstacle = self.obstacle(now)
        return {
            "url": self.url,
            "role": self.role,
            "up": not obstacle,
            "why": obstacle,
            "in_flight": self.in_flight,
            "requests": self.num_requests,
            "failures": self.num_failures,
            "instance": announced.instance if announced else None,
            "state": announced.state if announced else None,
            "weight_version": "/".join(filter(None, self.version)),
            "lease_s": max(0.0, self.lease_ends - now) if announced else None,
        }


Record = TypeVar("Record", bound=MemberRecord)


class _Instances:
    """The last announcements of at most `MOST_INSTANCES` instances, by their sequence numbers, and the instances that
    have ended."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[str, int] = OrderedDict()
        self._gone: OrderedDict[str, int] = OrderedDict()

    def accept(self, announcement: Announcement, member: MemberRecord | None, now: float) -> bool:
        """Record an announcement for the URL of `member`. Returns False if a later one of its instance was accepted.

        Raises Conflict for an instance that has ended, or that is older than the member's, which has a lease.
        """
        known = member.announced if member else None
        is_known = known is not None and known.instance == announcement.instance
        if announcement.instance in self._gone:
            raise Conflict(f"the instance {announcement.instance} is gone", code="instance_gone")
        if announcement.sequence <= self._sequences.get(announcement.instance, -1):
            if is_known:
                return False
            raise Conflict(f"{_normalized(announcement.url)} has another instance by now", code="instance_replaced")
        is_older = known is not None and not is_known and announcement.sequence <= known.sequence
        if member is not None and is_older and now < member.lease_ends:  # a machine's clock may begin anew
            raise Conflict(f"{_normalized(announcement.url)} has a newer instance", code="instance_replaced")
        _remember(self._sequences, announcement.instance, announcement.sequence)
        if announcement.state is State.GONE:
            _remember(self._gone, announcement.instance, announcement.sequence)
        return True


class Membership(Generic[Record]):
    """All members, by URL, with the prefixes that each may have cached. `make` returns a new record."""

    def __init__(self, make: Callable[[str, Role, bool], Record]) -> None:
        self._make = make
        self._by_url: dict[str, Record] = {}
        self._instances = _Instances()
        self.prefixes = Prefixes()

    @property
    def all(self) -> list[Record]:
        return list(self._by_url.values())

    def with_role(self, *roles: Role) -> list[Record]:
        """Return the members that have one of these roles, usable or not."""
        return [member for member in self.all if member.role in roles]

    def usable(self, roles: Iterable[Role], now: float) -> list[Record]:
        """Return the members with one of these roles that may get a new request."""
        return [member for member in self.with_role(*roles) if not member.obstacle(now)]

    def configure(self, url: str, role: Role) -> None:
        """Add a member of the command line, which no announcement removes. Raises ConfigError."""
        url = str(Origin(url))
        if url in self._by_url:
            raise ConfigError(f"{url} is given twice: give each server once, with its role")
        self._by_url[url] = self._make(url, role, True)

    def announce(self, announcement: Announcement, now: float) -> Record | None:
        """Apply an announcement. One that is not newer than the last of its instance changes nothing.

        Return the member if it must be checked at once: it has become ready, or has other weights.
        Raises Conflict for an instance that has ended, or that is older than one with a lease; and Overloaded if there
        are too many members.
        """
        url = _normalized(announcement.url)
        member = self._by_url.get(url)
        if member is not None and member.is_configured and member.role is not announcement.role:
            raise Conflict(
                f"{url} announces the role {announcement.role}, and the command line has {member.role}: start the "
                "router without this URL",
                code="role_mismatch",
            )
        if not self._instances.accept(announcement, member, now):
            return None
        if announcement.state is State.GONE:
            known = member.announced if member else None
            is_replaced = known is not None and known.instance != announcement.instance
            if is_replaced:
                return None
            if member is None or not member.is_configured:
                self._drop(url, "it is gone")
                return None
        return self._apply(member or self._added(url, announcement.role), announcement, now)

    def _apply(self, member: Record, announcement: Announcement, now: float) -> Record | None:
        known = member.announced
        member.role = announcement.role
        if known is not None and known.instance != announcement.instance:
            self.forget(member)
            member.down("a new instance, not checked yet")
            member.info = {}
        elif known is not None and known.weight_version != announcement.weight_version:
            self.forget(member)
        if known is None or known.state is not announcement.state:
            log.info(event("member_announced", role=member.role, at=member.url, state=announcement.state))
        member.announced, member.lease_ends = announcement, now + LEASE_S
        is_changed = known is None or _compared(known) != _compared(announcement)
        return member if is_changed and announcement.state is State.READY else None

    def expire(self, now: float) -> None:
        """Drop members whose lease expired a minute ago. One of the command line depends on health checks alone once
        its lease expires, and must pass the next one."""
        for member in self.all:
            if member.announced is None or now < member.lease_ends:
                continue
            if member.is_configured and member.announced.state is not State.GONE:
                member.announced, member.lease_ends = None, math.inf
                member.down("its announcements have ended, and it was not checked since")
                self.forget(member)
            elif not member.is_configured and now >= member.lease_ends + FORGET_S:
                self._drop(member.url, "its lease has expired")

    def checked(self, member: Record, info: dict[str, Any], num_downs: int) -> None:
        """Note a successful health check, with the server's /server_info. Other weights leave nothing cached.

        `num_downs` is that of the member when the check began: its success says nothing of a server that has gone down
        since.
        """
        if member.num_downs != num_downs:
            return
        before = member.version
        if not member.up:
            log.info(event("member_up", role=member.role, at=member.url, model=info.get("served_model_name")))
        member.info, member.up, member.why = info, True, ""
        if member.version != before:
            self.forget(member)

    def failed_check(self, member: Record, why: str) -> None:
        """Note a failed health check. A server of the command line that was gone may come back from now on."""
        member.down(why)
        if member.is_configured and member.announced is not None and member.announced.state is State.GONE:
            member.announced, member.lease_ends = None, math.inf

    def lost(self, member: Record, why: str) -> None:
        """Mark a member whose process has ended, or whose connection has failed: its cache is gone."""
        member.num_failures += 1
        member.down(why)
        self.forget(member)

    def forget(self, member: Record) -> None:
        """Drop what the prefix table has of a member, whose cache is empty or of no use now."""
        self.prefixes.forget(member.url)

    def retire(self, member: Record) -> None:
        """Release the resources of a member that was dropped; its running requests continue."""

    def _added(self, url: str, role: Role) -> Record:
        if len(self._by_url) >= MOST_MEMBERS:
            raise Overloaded(f"the router has {MOST_MEMBERS} members, its limit", code="too_many_members")
        member = self._by_url[url] = self._make(url, role, False)
        return member

    def _drop(self, url: str, why: str) -> None:
        if (member := self._by_url.pop(url, None)) is not None:
            log.info(event("member_removed", role=member.role, at=url, why=why))
            member.down(why)  # for a request that has selected it and still connects
            self.forget(member)
            self.retire(member)


def _compared(announcement: Announcement) -> tuple[str, State, str]:
    return announcement.instance, announcement.state, announcement.weight_version


def _remember(numbers: OrderedDict[str, int], instance: str, number: int) -> None:
    numbers[instance] = number
    numbers.move_to_end(instance)
    while len(numbers) > MOST_INSTANCES:
        numbers.popitem(last=False)


def _normalized(url: str) -> str:
    try:
        return str(Origin(url))
    except (ConfigError, ValueError) as error:  # a port that is no number
        raise InvalidRequest(f"{url!r} is no URL of a server: {error}", param="url") from None
