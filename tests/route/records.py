"""Members without servers, for tests of who gets a request."""

from __future__ import annotations

from typing import Any, Final

from forebay.route.announcement import Announcement, Role, State
from forebay.route.membership import MemberRecord, Membership

URL: Final = "http://a:1"
INSTANCES: Final = [f"{number:032x}" for number in range(10)]

Records = Membership[MemberRecord]


def membership(**urls: str) -> Records:
    """`membership(both="http://a:1 http://b:1")`, none of them up."""
    made: Records = Membership(
        lambda url, role, is_configured: MemberRecord(url=url, role=role, is_configured=is_configured)
    )
    for role, found in urls.items():
        for url in found.split():
            made.configure(url, Role(role))
    return made


def up(found: Records, *, versions: dict[str, str] | None = None) -> Records:
    """Let each member pass a health check, with its weight version by URL."""
    for member in found.all:
        found.checked(member, {"weight_version": (versions or {}).get(member.url, "0")}, member.num_downs)
    return found


def announcement(sequence: int, state: State = State.READY, **changes: Any) -> Announcement:
    said = {"url": URL, "role": Role.BOTH, "instance": INSTANCES[1], "weight_version": "v1", **changes}
    return Announcement(state=state, sequence=sequence, **said)
