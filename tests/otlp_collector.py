"""A collector of traces: OTLP over HTTP, in a thread, with all spans that it was sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.deadlines import wait_until


class CollectedSpan(NamedTuple):
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    started: int
    ended: int
    attributes: dict[str, Any]
    events: list[str]
    error: str
    service: str


class Collector:
    """`answers` is the status of its answers; while `hangs` is set it answers nobody."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[CollectedSpan] = []
        self.raw = b""
        self.answers = 200
        self.goes_on = threading.Event()
        self.goes_on.set()

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = attributes_of(resource.resource.attributes)["service.name"]
            self.spans += [collected(span, service) for scope in resource.scope_spans for span in scope.spans]

    def with_roots(self, num_roots: int) -> list[CollectedSpan]:
        """All spans, once so many of them are roots of a process."""
        wait_until(lambda: sum(span.kind == 2 for span in self.spans) >= num_roots, lambda: str(self.spans))
        return self.spans


def attributes_of(pairs: Any) -> dict[str, Any]:
    def value(found: Any) -> Any:
        kind = found.WhichOneof("value")
        return [value(each) for each in found.array_value.values] if kind == "array_value" else getattr(found, kind)

    return {pair.key: value(pair.value) for pair in pairs}


def collected(span: Any, service: str) -> CollectedSpan:
    attributes = attributes_of(span.attributes)
    return CollectedSpan(
        span.name, span.kind, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano, span.end_time_unix_nano, attributes, [event.name for event in span.events],
        attributes.get("error.type", ""), service,
    )  # fmt: skip


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.goes_on.wait()
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(collector.answers)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
