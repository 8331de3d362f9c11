"""The address of the other half of each choice. A gateway sends a request to a prefill and to a decode server.

Field names: `bootstrap_host` and `bootstrap_port` are the address at which the prefill server listens for decode
servers (port 8998 by default); `bootstrap_room` is a label that the gateway picks for both halves. `forebay route`
sends them in headers, other gateways in the body. Either way they make a decode server connect to a host. They are
therefore accepted from holders of the cluster key alone, or if the operator has named the prefill servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.base.proof import PROOF
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.http.security import Cluster, Sender, refused
from forebay.requests.transfers import MAX_ROOM, Rendezvous
from forebay.server.protocol.requests import Bootstrap
from forebay.server.protocol.validation import MISSING_FIELD, UNSUPPORTED_FIELD

FIELDS: Final = ("bootstrap_room", "bootstrap_host", "bootstrap_port")
DEFAULT_PORT: Final = DisaggregationOptions().bootstrap_port


def rendezvous_of(
    mode: DisaggregationMode, cluster: Cluster, sender: Sender, body: Bootstrap, count: int
) -> tuple[Rendezvous | None, ...]:
    """Return the rendezvous of each of `count` choices.

    `forebay route` sends the fields in headers (`sender`), and then the body has none: it is the client's. Raises
    InvalidRequest for fields that this server has no use for, and for those that it lacks, HttpError 403 for fields of
    a sender that may not choose.
    """
    if mode is DisaggregationMode.NULL:
        _refuse_all(body)
        return (None,) * count
    given = _given(sender, body)
    rooms, servers = _rooms(given, count), _servers(given, count)
    if rooms or servers:
        check_named(cluster, sender, servers or () if mode is DisaggregationMode.DECODE else ())
    if rooms is None:
        raise _missing("bootstrap_room", mode)
    if mode is DisaggregationMode.PREFILL:
        return tuple(Rendezvous("", 0, room) for room in rooms)
    if servers is None:
        raise _missing("bootstrap_host", mode)
    return tuple(Rendezvous(host, port, room) for (host, port), room in zip(servers, rooms, strict=True))


def _given(sender: Sender, body: Bootstrap) -> Bootstrap:
    """Return the fields of the headers if there are any, else those of the body. Raises InvalidRequest for both."""
    if not sender.bootstrap:
        return body
    _refuse_all(body)
    return _of_headers(sender.bootstrap)


def _rooms(given: Bootstrap, count: int) -> list[int] | None:
    """Return the room of each choice, None without any; a single number is the first of `count` consecutive rooms."""
    rooms = _of_each("bootstrap_room", given.bootstrap_room, count)
    if rooms is not None and not isinstance(given.bootstrap_room, list):
        rooms = [(room + i) & MAX_ROOM for i, room in enumerate(rooms)]
    return rooms


def _servers(given: Bootstrap, count: int) -> list[tuple[str, int]] | None:
    """Return the prefill server's host and port for each choice, None without hosts."""
    hosts = _of_each("bootstrap_host", given.bootstrap_host, count)
    ports = _of_each("bootstrap_port", given.bootstrap_port, count) or [None] * count
    return None if hosts is None else [(host, port or DEFAULT_PORT) for host, port in zip(hosts, ports, strict=True)]


def check_named(cluster: Cluster, sender: Sender, servers: Sequence[tuple[str, int]]) -> None:
    """Raises HttpError 403 unless the operator has named all these servers or, if none is named, the sender has the
    cluster key. Its holders are bound by a list, too."""
    if cluster.has_configured_servers:
        if others := [f"{host}:{port}" for host, port in servers if not cluster.is_configured(host, port)]:
            raise refused(
                f"{others[0][:200]!a} is not among --disaggregation-prefill-servers, which are all that may be named"
            )
        return
    if sender.is_gateway:
        return
    raise refused(
        f"bootstrap_host, bootstrap_port and bootstrap_room are for gateways that prove the cluster key ({PROOF}), or "
        "for servers of --disaggregation-prefill-servers: leave them out"
    )


def _of_headers(words: Mapping[str, str]) -> Bootstrap:
    """Raises InvalidRequest that names the field."""
    numbers = {name: int(words[name]) for name in ("room", "port") if _is_number(words.get(name, ""))}
    return Bootstrap.parse({f"bootstrap_{name}": word for name, word in {**words, **numbers}.items()})


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= len(str(MAX_ROOM))


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
                f"{name} is for gateways and servers with --disaggregation-mode prefill or decode, and requests here "
                "are whole: leave it out",
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
