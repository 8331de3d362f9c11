"""A pattern through every region between two engines: whether all of it arrives where it should, and how fast.

One side runs a `PatternSource`, the other a `PatternSink`; the places are the caller's, who has nothing else in them.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

import numpy as np

from forebay.base.errors import EngineError, from_code
from forebay.base.units import human_bytes
from forebay.disagg.build import memory_of
from forebay.disagg.memory import U8, shapes_of
from forebay.disagg.pages import Piece, extents, pieces
from forebay.disagg.worker import Worker
from forebay.pools.cache_pool import CachePool
from forebay.requests.transfers import Arrived, Broken, Closed, Event, Offer, Offered, Send, Sent, Span, Tail, Ticket

ROOM: Final = 0  # of checks: those of requests are chosen at random
_POLL_S: Final = 0.1

E = TypeVar("E")


class Report(NamedTuple):
    """`seconds` from the offer to the news that all has arrived, and `cpu_seconds` of this process meanwhile; `wrong`
    names the regions that hold something else."""

    num_bytes: int
    seconds: float
    cpu_seconds: float
    wrong: list[str]

    def __str__(self) -> str:
        speed = f"{human_bytes(self.num_bytes)} in {self.seconds:.3f} s: {self.num_bytes / self.seconds / 1e9:.2f} GB/s"
        return f"{speed}; NOT what was sent: {', '.join(self.wrong)}" if self.wrong else f"{speed}, all as sent"


class _Pattern:
    """What every place of a sequence holds, made from its position: the same on both sides."""

    def __init__(self, cache: CachePool, spans: Mapping[str, Span], num_tokens: int) -> None:
        self._shapes = shapes_of(cache)
        self._memory = memory_of(cache, self._shapes)
        self._spans, self._extents = spans, extents(self._shapes, spans, num_tokens)
        self._names = {kind: [region.name for region in cache.regions() if region.kind == kind] for kind in spans}

    def _pieces(self) -> Iterator[tuple[Piece, U8]]:
        """Each of one region."""
        for kind, span in self._spans.items():
            shape, (first, end) = self._shapes[kind], self._extents[kind]
            for region, size in enumerate(shape.bytes_per_place):
                for whole in pieces(kind, shape, span, first, end):
                    if whole.region == 0:
                        piece = whole._replace(region=region, num_regions=1)
                        seed = np.random.SeedSequence([region, piece.first, *kind.encode()])
                        yield (
                            piece,
                            np.random.default_rng(seed).integers(0, 256, size * len(piece.places), dtype=np.uint8),
                        )

    def write(self) -> None:
        for piece, data in self._pieces():
            self._memory.scatter(piece, data)

    def clear(self) -> None:
        for piece, data in self._pieces():
            self._memory.scatter(piece, np.zeros_like(data))

    def wrong(self) -> list[str]:
        staging = self._memory.staging(max(len(data) for _, data in self._pieces()))
        return sorted(
            {
                f"{piece.kind} {self._names[piece.kind][piece.region]}"
                for piece, data in self._pieces()
                if not np.array_equal(self._memory.gather(piece, staging), data)
            }
        )

    @property
    def num_bytes(self) -> int:
        return sum((end - first) * sum(self._shapes[k].bytes_per_place) for k, (first, end) in self._extents.items())


class _News:
    def __init__(self, transfers: Worker, timeout_s: float) -> None:
        self._transfers, self._timeout_s = transfers, timeout_s
        self._found: list[Event] = []

    def wait(self, kind: type[E], nonce: bytes | None = None) -> E:
        """Raises what a ticket broke with, EngineError where nothing comes."""
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            select.select([self._transfers], [], [], _POLL_S)
            self._found += self._transfers.poll()
            for event in self._found:
                if nonce is None or event.ticket.nonce == nonce:
                    if isinstance(event, kind):
                        return event
                    if isinstance(event, Broken):
                        failure = event.failure
                        raise from_code(failure.kind, failure.message, failure.code)
        raise EngineError(f"no {kind.__name__} within {self._timeout_s:g} s", code="check_timeout")


class PatternSource:
    """Prefill's side."""

    def __init__(
        self, transfers: Worker, cache: CachePool, spans: Mapping[str, Span], num_tokens: int, *, timeout_s: float
    ) -> None:
        """Writes the pattern of so many tokens into `spans`."""
        self._transfers, self._spans, self._timeout_s = transfers, dict(spans), timeout_s
        self._tail = Tail(num_tokens=num_tokens, token_id=0)
        _Pattern(cache, spans, num_tokens).write()

    def answer(self) -> None:
        """Send it to the next who offers places."""
        self._news = _News(self._transfers, self._timeout_s)
        ticket = self._news.wait(Offered).ticket
        self._transfers.submit(Send(ticket=ticket, spans=self._spans, tail=self._tail))
        self._news.wait(Sent, ticket.nonce)
        self._news.wait(Closed, ticket.nonce)


class PatternSink:
    """Decode's side."""

    def __init__(
        self, transfers: Worker, cache: CachePool, spans: Mapping[str, Span], num_tokens: int, *, timeout_s: float
    ) -> None:
        self._transfers, self._spans, self._num_tokens = transfers, dict(spans), num_tokens
        self._pattern, self._timeout_s = _Pattern(cache, spans, num_tokens), timeout_s

    def fetch(self, host: str, port: int) -> Report:
        """From the prefill engine that listens there, into `spans`."""
        ticket = Ticket(self._transfers.instance, ROOM, secrets.token_bytes(16))
        self._pattern.clear()
        self._news = _News(self._transfers, self._timeout_s)
        begin, cpu_begin = time.monotonic(), time.process_time()
        self._transfers.submit(
            Offer(
                ticket=ticket,
                host=host,
                port=port,
                num_tokens=self._num_tokens,
                digest=b"",
                start=0,
                spans=self._spans,
            )
        )
        self._news.wait(Arrived, ticket.nonce)
        seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - cpu_begin
        self._news.wait(Closed, ticket.nonce)
        return Report(self._pattern.num_bytes, seconds, cpu_seconds, self._pattern.wrong())
