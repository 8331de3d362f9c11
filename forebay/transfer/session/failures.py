"""How transfers fail: each way has a code of its own. What two servers cannot do, another pair can: a 503."""

from __future__ import annotations

from forebay.base.errors import EngineError, RequestTimeout, Unavailable
from forebay.requests.updates import Failure


def bootstrap_timeout(where: str, seconds: float) -> Failure:
    return Failure.of(
        RequestTimeout(
            f"no session with the prefill server at {where} within {seconds:g} s: is it up, and is this its "
            "--disaggregation-bootstrap-port?",
            code="bootstrap_timeout",
        )
    )


def heartbeat_timeout(where: str, seconds: float) -> Failure:
    return Failure.of(RequestTimeout(f"{where} has not been heard of for {seconds:g} s", code="heartbeat_timeout"))


def lease_timeout(where: str, seconds: float) -> Failure:
    return Failure.of(RequestTimeout(f"{where} has not gone on for {seconds:g} s", code="lease_timeout"))


def peer_lost(where: str, why: str) -> Failure:
    return Failure.of(Unavailable(f"the connection to {where} has ended: {why}", code="peer_lost"))


def peer_rejected(where: str, error: Exception) -> Failure:
    """The peer's message could not be handled: the peer, or this engine, has a bug."""
    what = f"{type(error).__name__} while a message of {where} was handled: the session has ended, and the log says why"
    return Failure.of(Unavailable(what, code="peer_rejected"))


def peer_asleep(where: str) -> Failure:
    return Failure.of(Unavailable(f"the prefill server at {where} is asleep: send it again", code="peer_asleep"))


def layout_mismatch(difference: str) -> Failure:
    return Failure.of(Unavailable(f"prefill and decode do not fit together: {difference}", code="layout_mismatch"))


def no_transport(prefill: list[str], decode: list[str]) -> Failure:
    return Failure.of(
        Unavailable(
            f"no transfer backend in common: prefill has {prefill}, decode {decode}: see "
            "--disaggregation-transfer-backend",
            code="transfer_backend_mismatch",
        )
    )


def key_required(host: str) -> Failure:
    return Failure.of(
        Unavailable(f"{host} is not this machine: give both servers the same --cluster-key-file", code="cluster_key")
    )


def altered(kind: str, first: int, end: int) -> Failure:
    return Failure.of(
        EngineError(f"{kind} {first}..{end} has another checksum than what was sent", code="checksum_mismatch")
    )
