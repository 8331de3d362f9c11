"""Traces of requests, as W3C trace context and OpenTelemetry have them: https://www.w3.org/TR/trace-context/.

A request's spans are objects of its own process, made when a thing has happened or begun, and handed over as a whole
when the request ends. Nothing is traced per token. No span has a prompt, a text or a key.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

TRACE: Final = "forebay.trace"  # key of a request's scope
TRACEPARENT: Final = b"traceparent"
CLIENT_GONE: Final = "client_gone"  # in the place of an error's code: nobody got one
_FORM: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED: Final = 1
_TRACE_BITS, _SPAN_BITS, _RATIO_BITS = 128, 64, 64

AttributeValue = str | bool | int | float | Sequence[str]
# Routes whose requests are traced, with the operation that GenAI conventions call them.
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
OPERATIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"), CHAT),
    **dict.fromkeys(("/v1/completions", "/generate", "/completion", "/api/generate"), COMPLETION),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), EMBEDDINGS),
}


class Parent(NamedTuple):
    """The caller's span, and whether the caller samples the trace."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(value: bytes) -> Parent | None:
    """Return the parent that a `traceparent` header names; None for one that is not of the standard's form."""
    match = _FORM.fullmatch(value)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and len(value) != match.end(4)):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return Parent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None


@dataclass(slots=True, eq=False)
class Span:
    """One part of a request's time. Times are `time.monotonic()`; `ended` is None while it runs. `events` are names
    with their times. `error` is the code of the error that ended it."""

    name: str
    span_id: int
    parent_id: int
    started: float
    ended: float | None = None
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    error: str = ""
    is_client: bool = False  # it waits for another server

    def end(self, error: str = "") -> None:
        """End it now; no-op the second time."""
        if self.ended is None:
            self.ended, self.error = time.monotonic(), error


class Trace:
    """The spans of one request in one process: `root`, which lasts as long as the request, and what is below it."""

    def __init__(self, parent: Parent | None, name: str, started: float) -> None:
        self.trace_id = parent.trace_id if parent else _new_id(_TRACE_BITS)
        self.root = Span(name, _new_id(_SPAN_BITS), parent.span_id if parent else 0, started)
        self.spans = [self.root]
        self.error = ""  # code of the error that the client got, or would have got

    def begin(self, name: str, attributes: dict[str, AttributeValue], *, is_client: bool = False) -> Span:
        """Return a new span below the root, which begins now."""
        span = Span(name, _new_id(_SPAN_BITS), self.root.span_id, time.monotonic(), None, attributes)
        span.is_client = is_client
        self.spans.append(span)
        return span

    def add(self, name: str, started: float, ended: float, events: Iterable[tuple[str, float]] = ()) -> None:
        """Add a span below the root that has ended."""
        span = Span(name, _new_id(_SPAN_BITS), self.root.span_id, started, max(started, ended))
        span.events.extend(events)
        self.spans.append(span)

    def end(self, error: str = "") -> None:
        """End the root, and the spans that still run: the request was aborted there."""
        for span in reversed(self.spans):
            span.end(error)

    def parent_of(self, span: Span) -> str:
        """Return the `traceparent` for a server whose work is below the span."""
        return f"00-{self.trace_id:032x}-{span.span_id:016x}-{_SAMPLED:02x}"

    @property
    def ids(self) -> dict[str, str]:
        """Return the fields that lines of the log have of it."""
        return {"trace_id": f"{self.trace_id:032x}", "span_id": f"{self.root.span_id:016x}"}


class Exports(Protocol):
    """Takes ended traces."""

    def put(self, trace: Trace) -> None:
        """Export an ended trace, or drop and count its spans; never waits."""

    def close(self) -> None:
        """Export what was put, as far as that takes seconds."""


class Tracer:
    """Decides which requests are traced: those whose caller samples its trace, and of those without a caller's trace
    the part `ratio`, by the trace id."""

    def __init__(self, exports: Exports, ratio: float) -> None:
        self._exports = exports
        self._limit = int(ratio * (1 << _RATIO_BITS))

    def begin(self, route: str, headers: Iterable[tuple[bytes, bytes]], started: float) -> Trace | None:
        """Return the trace of a request, or None if it is not traced."""
        operation = OPERATIONS.get(route.rstrip("/")) or OPERATIONS.get(f"/v1{route.rstrip('/')}")
        if operation is None:
            return None
        parent = next((parse_traceparent(value) for name, value in headers if name == TRACEPARENT), None)
        if parent is not None and not parent.sampled:
            return None
        trace = Trace(parent, operation, started)
        if parent is None and trace.trace_id % (1 << _RATIO_BITS) >= self._limit:
            return None
        trace.root.attributes |= {"gen_ai.operation.name": operation, "url.path": route}
        return trace

    def end(self, trace: Trace) -> None:
        """End a trace and export it."""
        trace.end(trace.error)
        self._exports.put(trace)

    def close(self) -> None:
        """End the export."""
        self._exports.close()


class Traced:
    """An ASGI application whose requests are traced: a trace is in its request's scope, and ends with the request."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http"
        trace = self._tracer.begin(scope["path"], scope["headers"], time.monotonic()) if is_request else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._app({**scope, TRACE: trace}, receive, send)
        finally:
            self._tracer.end(trace)


def traced(app: ASGIApp, tracer: Tracer | None) -> ASGIApp:
    """Return the application with its requests traced, if there is a tracer."""
    return app if tracer is None else Traced(app, tracer)


def note_error(scope: Scope, code: str) -> None:
    """Note the code of the error that ends a request, if it is traced."""
    if TRACE in scope:
        scope[TRACE].error = code


def _new_id(num_bits: int) -> int:
    while True:
        if number := secrets.randbits(num_bits):
            return number
