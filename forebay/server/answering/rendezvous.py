"""Where the other half of each choice is, as a gateway says it: the same body goes to a prefill and to a decode server.

The field's names: `bootstrap_host` and `bootstrap_port` are where the prefill server listens for decode servers (8998
where no port is said), `bootstrap_room` is a label that the gateway picks for both halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.requests.transfers import MAX_ROOM, Rendezvous
from forebay.server.protocol.requests import Bootstrap
from forebay.server.protocol.validation import MISSING_FIELD, UNSUPPORTED_FIELD

FIELDS: Final = ("bootstrap_room", "bootstrap_host", "bootstrap_port")
DEFAULT_PORT: Final = DisaggregationOptions().bootstrap_port


def rendezvous_of(mode: DisaggregationMode, body: Bootstrap, count: int) -> Sequence[Rendezvous | None]:
    """Of each of `count` choices; one number of a room stands for as many from it on. Raises InvalidRequest for fields
    that this server has no use for, and for those that it lacks."""
    if mode is DisaggregationMode.NULL:
        _refuse_all(body)
        return [None] * count
    rooms = _of_each("bootstrap_room", body.bootstrap_room, count)
    if rooms is None:
        raise _missing("bootstrap_room", mode)
    if not isinstance(body.bootstrap_room, list):
        rooms = [(room + i) & MAX_ROOM for i, room in enumerate(rooms)]
    if mode is DisaggregationMode.PREFILL:
        return [Rendezvous("", 0, room) for room in rooms]
    hosts = _of_each("bootstrap_host", body.bootstrap_host, count)
    ports = _of_each("bootstrap_port", body.bootstrap_port, count) or [None] * count
    if hosts is None:
        raise _missing("bootstrap_host", mode)
    return [Rendezvous(host, port or DEFAULT_PORT, room) for host, port, room in zip(hosts, ports, rooms, strict=True)]


def _of_each(name: str, value: Any, count: int) -> list[Any] | None:
    if not isinstance(value, list):
        return None if value is None else [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} entries and there are {count} prompts and choices: give one for each", param=name
        )
    return value


def _refuse_all(body: Bootstrap) -> None:
    for name in FIELDS:
        if getattr(body, name) is not None:
            raise InvalidRequest(
                f"{name} is for servers with --disaggregation-mode prefill or decode, and this one computes whole "
                "requests: leave it out",
                code=UNSUPPORTED_FIELD,
                param=name,
            )


def _missing(name: str, mode: DisaggregationMode) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is missing: this is a {mode} server, which has its requests from a gateway that names it (forebay "
        "route)",
        code=MISSING_FIELD,
        param=name,
    )
