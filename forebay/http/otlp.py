"""The export of traces by OTLP over HTTP, on a thread of its own. Needs the extra `forebay[otel]`.

The exporter of OpenTelemetry reads its own variables too: OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES and others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, Full, Queue
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from forebay.base.package import __version__
from forebay.http.tracing import Span, Trace

MOST_TRACES: Final = 512  # that wait
BATCH: Final = 64  # traces in one request to the collector
TIMEOUT_S: Final = 5.0
_PATH: Final = "/v1/traces"
_SCOPE: Final = InstrumentationScope("forebay", __version__)


class OtlpExporter:
    """Sends ended traces to a collector. A collector that is down, slow or hanging changes nothing but the number of
    spans that are dropped."""

    def __init__(self, endpoint: str, process: str, instance: str, count_dropped: Callable[[int], None]) -> None:
        """`process` is the service's name unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name it; `instance` is
        this server's address. `count_dropped` is called with the number of spans that were dropped, on any thread."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a collector that is down is a counter
        ours = Resource({SERVICE_NAME: process, SERVICE_INSTANCE_ID: instance})
        self._resource = ours.merge(OTELResourceDetector().detect())
        self._exporter = OTLPSpanExporter(endpoint=_with_path(endpoint), timeout=TIMEOUT_S)
        self._waiting: Queue[Trace | None] = Queue(MOST_TRACES)
        self._behind = time.time() - time.monotonic()  # of the monotonic clock against Unix time
        self._count_dropped = count_dropped
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def put(self, trace: Trace) -> None:
        """Queue an ended trace; one that finds the queue full is dropped."""
        try:
            self._waiting.put_nowait(trace)
        except Full:
            self._count_dropped(len(trace.spans))

    def close(self) -> None:
        """Send what waits, for at most `TIMEOUT_S`."""
        try:
            self._waiting.put(None, timeout=TIMEOUT_S)
            self._thread.join(TIMEOUT_S)
        except Full:
            pass  # the collector hangs: the thread ends with the process

    def _work(self) -> None:
        ends = False
        while not ends:
            batch = [self._waiting.get()]
            while len(batch) < BATCH:
                try:
                    batch.append(self._waiting.get_nowait())
                except Empty:
                    break
            ends = None in batch
            self._send([span for trace in batch if trace is not None for span in self._spans(trace)])

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            sent = not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            sent = False
        if not sent:
            self._count_dropped(len(spans))

    def _spans(self, trace: Trace) -> list[ReadableSpan]:
        return [self._readable(trace, span) for span in trace.spans]

    def _readable(self, trace: Trace, span: Span) -> ReadableSpan:
        kind = SpanKind.SERVER if span is trace.root else SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL
        parent = _context(trace.trace_id, span.parent_id, remote=span is trace.root) if span.parent_id else None
        attributes = {**span.attributes, "error.type": span.error} if span.error else span.attributes
        ended = span.started if span.ended is None else span.ended
        return ReadableSpan(
            span.name,
            context=_context(trace.trace_id, span.span_id, remote=False),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=[Event(name, timestamp=self._nanoseconds(at)) for name, at in span.events],
            kind=kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=self._nanoseconds(span.started),
            end_time=self._nanoseconds(ended),
            instrumentation_scope=_SCOPE,
        )

    def _nanoseconds(self, at: float) -> int:
        return int((self._behind + at) * 1e9)


def _context(trace_id: int, span_id: int, *, remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def _with_path(endpoint: str) -> str:
    """Return the collector's URL: one without a path gets OTLP's."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
