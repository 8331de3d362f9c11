"""Circumstances that a client can bring about around a request, each with the count that proves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forebay.verify.remote.server import Options
from forebay.verify.remote.session import Findings, Session

Play = Callable[[Session], Awaitable[None]]
Shown = Callable[[Session], str]
_WIDTHS: Final = (1, 4, 16, 64)  # requests in flight beside a compared one


class Group(StrEnum):
    """The part of a server that a circumstance is about, for the verdict."""

    REPEATED = "the request is repeated"
    BATCH = "batch"
    ARRIVALS = "prompts that arrive"
    FORM = "form"  # of the answer: streamed, with log-probabilities
    CACHE = "prefix cache"
    ABORTS = "an abort before it"
    SERVERS = "server"


@dataclass(frozen=True, slots=True)
class Circumstance:
    """`play` asks the questions. `shown` returns how far the circumstance came about, "" if it did not. `size` is the
    number of other requests of a batch."""

    name: str
    group: Group
    play: Play
    shown: Shown
    size: int = 0


def circumstances() -> list[Circumstance]:
    """Return all that one server can be asked for, cheap ones first."""
    return [
        Circumstance("asked again, backwards", Group.REPEATED, Session.repeated, _answered),
        Circumstance("streamed", Group.FORM, _streamed, _answered),
        Circumstance("without log-probabilities", Group.FORM, _plain, _had_logprobs),
        *(Circumstance(f"beside {width}", Group.BATCH, _beside(width), _crowd(width), width) for width in _WIDTHS[:2]),
        Circumstance("from the prefix cache", Group.CACHE, Session.twice_warm, _cached),
        Circumstance("after a similar prompt", Group.CACHE, Session.after_siblings, _cached),
        Circumstance("after an abort", Group.ABORTS, Session.after_aborts, _aborted),
        *(Circumstance(f"beside {width}", Group.BATCH, _beside(width), _crowd(width), width) for width in _WIDTHS[2:]),
        Circumstance("long prompts arrive", Group.ARRIVALS, Session.with_arrivals, _arrived),
    ]


def at_another(url: str) -> Circumstance:
    """Return the circumstance that the request goes to the server at `url` instead."""
    return Circumstance(f"at {url}", Group.SERVERS, _backwards, _answered)


def _beside(width: int) -> Play:
    return lambda session: session.beside(width)


async def _backwards(session: Session) -> None:
    await session.one_by_one(backwards=True)


async def _streamed(session: Session) -> None:
    await session.one_by_one(Options(stream=True))


async def _plain(session: Session) -> None:
    if session.server.gives_logprobs:
        await session.one_by_one(Options(logprobs=False))


def _answered(session: Session) -> str:
    return f"{session.findings.num_answers} answers"


def _had_logprobs(session: Session) -> str:
    return _answered(session) if session.server.gives_logprobs else ""


def _crowd(width: int) -> Shown:
    def shown(session: Session) -> str:
        most = session.findings.most_beside
        return f"up to {most} other{'s' * (most > 1)} in flight" if most >= width else ""

    return shown


def _cached(session: Session) -> str:
    found: Findings = session.findings
    return f"{found.cached_tokens:,} tokens of prompts were cached" if found.cached_tokens else ""


def _aborted(session: Session) -> str:
    num = session.findings.num_aborted
    return f"{num} answers cut off" if num else ""


def _arrived(session: Session) -> str:
    num = session.findings.num_arrived
    return f"{num} prompts came while others were answered" if num else ""
