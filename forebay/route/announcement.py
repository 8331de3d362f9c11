"""The message by which the process that started a server makes it known to a router: the body of `POST /members`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from forebay.config.engine_config import DisaggregationMode

MEMBERS_PATH: Final = "/members"
ANNOUNCE_INTERVAL_S: Final = 3.0
LEASE_S: Final = 10.0  # from an announcement's arrival: two may be lost
MAX_URL_CHARS: Final = 512
MAX_VERSION_CHARS: Final = 128
_INSTANCE: Final = "^[0-9a-f]{32}$"


class Role(StrEnum):
    """The part of a request that a member computes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def noun(self) -> str:
        return "server of both roles" if self is Role.BOTH else f"{self} server"

    @classmethod
    def of(cls, mode: object) -> Role | None:
        """Return the role of a server by the `disaggregation_mode` of its /server_info, None for an unknown one."""
        roles = {
            DisaggregationMode.NULL: cls.BOTH,
            DisaggregationMode.PREFILL: cls.PREFILL,
            DisaggregationMode.DECODE: cls.DECODE,
        }
        return roles.get(mode)  # type: ignore[call-overload, no-any-return]


class State(StrEnum):
    """The state of a server, as the process that started it says. A server that is `gone` has ended."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Announcement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server at one moment.

    `instance` is new for each start of the process. `sequence` grows from one announcement of a machine to the next,
    across instances, so that a late one is recognized: `Announcer` takes the machine's monotonic clock, in ns.
    """

    url: Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS)]
    role: Role
    instance: Annotated[str, msgspec.Meta(pattern=_INSTANCE)]
    weight_version: Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]
    state: State
    sequence: Annotated[int, msgspec.Meta(ge=0)]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an announcement: for how long it holds, and how many members the router has."""

    lease_s: float
    members: int
