"""Metrics that the router counts itself; the members have their own /metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forebay.route.members import Member, Members
from forebay.route.selection import Reason


class RouteMetrics:
    """Prometheus metrics of the router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"forebay:route_{name}", text, ["role", "server"], registry=self._registry)

        text = "Requests answered with an error before their first token, by code"
        self._refused = Counter("forebay:requests_refused", text, ["code"], registry=self._registry)
        text = "Requests sent to a server, or to a pair of them, by the reason for which it was selected"
        self._selected = Counter("forebay:route_selections", text, ["reason"], registry=self._registry)
        for reason in Reason:
            self._selected.labels(reason)
        text = "Changes of the prefix table that the standby router did not get in time; all of it is sent again"
        self._not_sent = Counter("forebay:route_standby_dropped", text, registry=self._registry)
        text = "Spans of traces that were not exported: the collector was down or slow"
        self._spans_dropped = Counter("forebay:traces_dropped", text, registry=self._registry)
        text = "Attempts that failed before their first byte, by the server that failed and the code"
        self._attempts = Counter("forebay:route_attempts_failed", text, ["server", "code"], registry=self._registry)
        text = "Requests that were sent again, to another server"
        self._retries = Counter("forebay:route_retries", text, registry=self._registry)
        text = "From sending a request to the head of its answer, which of a stream comes with its first token"
        self._answers = Histogram("forebay:route_answer_seconds", text, ["server"], registry=self._registry)
        self._up = gauge("server_up", "Whether a server takes requests")
        self._in_flight = gauge("server_requests", "Requests that a server has now")
        self._total = gauge("server_requests_total", "Requests that a server has had")
        self._failures = gauge("server_failures_total", "Times that a server could not be reached")

    def count_error(self, code: str) -> None:
        """Count a request that was refused with this error code."""
        self._refused.labels(code).inc()

    def count_selected(self, reason: Reason) -> None:
        """Count an attempt to send a request."""
        self._selected.labels(reason).inc()

    def count_failed_attempt(self, members: Sequence[Member], code: str) -> None:
        """Count an attempt whose servers gave no answer that the client could get."""
        for member in members:
            self._attempts.labels(member.url, code).inc()

    def count_answer(self, member: Member, seconds: float, num_attempts: int) -> None:
        """Count a request that a server answers, `seconds` after the last of its attempts began."""
        self._answers.labels(member.url).observe(seconds)
        self._retries.inc(num_attempts - 1)

    def count_spans_dropped(self, num: int) -> None:
        """Count spans that the collector of traces did not get."""
        self._spans_dropped.inc(num)

    def count_dropped(self, num: int) -> None:
        """Count changes of the prefix table that were not sent to the standby router."""
        self._not_sent.inc(num)

    def render(self, members: Members) -> bytes:
        """Return all metrics in the Prometheus text format."""
        for gauge in (self._up, self._in_flight, self._total, self._failures):
            gauge.clear()  # of members that were removed
        for member in members.all:
            for gauge, value in self._of(member, members.now):
                gauge.labels(member.role, member.url).set(value)
        return generate_latest(self._registry)

    def _of(self, member: Member, now: float) -> tuple[tuple[Gauge, int], ...]:
        return (
            (self._up, int(not member.obstacle(now))),
            (self._in_flight, member.in_flight),
            (self._total, member.num_requests),
            (self._failures, member.num_failures),
        )
