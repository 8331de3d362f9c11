"""Metrics that the router counts itself; the members have their own /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from forebay.route.members import Member, Members


class RouteMetrics:
    """Prometheus metrics of the router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"forebay:route_{name}", text, ["role", "server"], registry=self._registry)

        text = "Requests answered with an error before their first token, by code"
        self._refused = Counter("forebay:requests_refused", text, ["code"], registry=self._registry)
        self._up = gauge("server_up", "Whether a server takes requests")
        self._in_flight = gauge("server_requests", "Requests that a server has now")
        self._total = gauge("server_requests_total", "Requests that a server has had")
        self._failures = gauge("server_failures_total", "Times that a server could not be reached")

    def count_error(self, code: str) -> None:
        """Count a request that was refused with this error code."""
        self._refused.labels(code).inc()

    def render(self, members: Members) -> bytes:
        """Return all metrics in the Prometheus text format."""
        for member in members.all:
            for gauge, value in self._of(member):
                gauge.labels(member.role, member.name).set(value)
        return generate_latest(self._registry)

    def _of(self, member: Member) -> tuple[tuple[Gauge, int], ...]:
        return (
            (self._up, int(member.up)),
            (self._in_flight, member.in_flight),
            (self._total, member.num_requests),
            (self._failures, member.num_failures),
        )
