"""Metrics of the router: each series has its name, type, labels and value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from forebay.route.metrics import RouteMetrics
from forebay.route.selection import Reason


def rendered(metrics: RouteMetrics, *members: SimpleNamespace) -> dict[tuple[str, ...], tuple[str, float]]:
    """Return type and value by name and labels; without the times at which counters were created."""
    of_all: Any = SimpleNamespace(all=members, now=5.0)
    return {
        (sample.name, *sample.labels.values()): (family.type, sample.value)
        for family in text_string_to_metric_families(metrics.render(of_all).decode())
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_route_metrics_each_series_has_its_own_value() -> None:
    metrics = RouteMetrics()
    for code in ("overloaded", "overloaded", "unavailable"):
        metrics.count_error(code)
    metrics.count_selected(Reason.PREFIX)
    metrics.count_dropped(4)
    metrics.count_spans_dropped(5)
    server: Any = SimpleNamespace(url="u")
    metrics.count_failed_attempt([server], "member_lost")
    metrics.count_answer(server, 0.25, 4)
    member = SimpleNamespace(
        role="decode",
        url="u",
        in_flight=2,
        num_requests=7,
        num_failures=3,
        obstacle=lambda now: "" if now == 5 else "x",
    )
    away = SimpleNamespace(
        role="prefill", url="v", in_flight=0, num_requests=9, num_failures=6, obstacle=lambda now: "it is away"
    )
    expected = {
        ("forebay:requests_refused_total", "overloaded"): ("counter", 2),
        ("forebay:requests_refused_total", "unavailable"): ("counter", 1),
        **{("forebay:route_selections_total", reason): ("counter", reason is Reason.PREFIX) for reason in Reason},
        ("forebay:route_standby_dropped_total",): ("counter", 4),
        ("forebay:traces_dropped_total",): ("counter", 5),
        ("forebay:route_attempts_failed_total", "member_lost", "u"): ("counter", 1),
        ("forebay:route_retries_total",): ("counter", 3),
        ("forebay:route_answer_seconds_count", "u"): ("histogram", 1),
        ("forebay:route_answer_seconds_sum", "u"): ("histogram", 0.25),
        ("forebay:route_server_up", "decode", "u"): ("gauge", 1),
        ("forebay:route_server_requests", "decode", "u"): ("gauge", 2),
        ("forebay:route_server_requests_total", "decode", "u"): ("gauge", 7),
        ("forebay:route_server_failures_total", "decode", "u"): ("gauge", 3),
    }
    of_away = {
        ("forebay:route_server_up", "prefill", "v"): ("gauge", 0),
        ("forebay:route_server_requests", "prefill", "v"): ("gauge", 0),
        ("forebay:route_server_requests_total", "prefill", "v"): ("gauge", 9),
        ("forebay:route_server_failures_total", "prefill", "v"): ("gauge", 6),
    }
    assert rendered(metrics, member, away) == expected | of_away
    assert rendered(metrics, member) == expected, "a member that was removed has no series"
