"""Traces of a server: one complete tree of spans for each request, whatever becomes of it, and no text in any."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics

from forebay.http.tracing import Parent, parse_traceparent
from forebay.requests.updates import History, SpeculationReport, WaitedFor
from tests.deadlines import wait_until
from tests.otlp_collector import CollectedSpan, Collector, collecting
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
KEY = "sk-canary-0123456789abcdef"
CANARY = "canary-of-the-prompt"

Launch = Callable[..., Running]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def traced(launch: Launch, collector: Collector, make_engine: Callable[[], FakeEngine] = FakeEngine) -> Running:
    return launch(make_engine, otlp_traces_endpoint=collector.url, trace_ratio=0.0, api_keys=(KEY,))


def ask(server: Running, headers: dict[str, str] = PARENT, **fields: Any) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3, **fields}
    sent = {"authorization": f"Bearer {KEY}", **headers}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body, headers=sent) as answer:
        answer.read()
        return answer.status_code


def tree_of(spans: list[CollectedSpan]) -> tuple[CollectedSpan, list[str]]:
    """The root and the names of its children; every span is in one tree, closed, and within its root's time."""
    (root,) = [span for span in spans if span.kind == 2]
    children = [span for span in spans if span is not root]
    assert {span.trace_id for span in spans} == {TRACE}
    assert {span.parent_id for span in children} <= {root.span_id}
    assert all(root.started <= span.started <= span.ended <= root.ended for span in children)
    assert len({span.span_id for span in spans}) == len(spans)
    return root, [span.name for span in children]


@pytest.mark.parametrize("stream", [False, True])
def test_answered_request_is_one_tree_below_its_caller(launch: Launch, collector: Collector, stream: bool) -> None:
    server = traced(launch, collector)
    server.engine.history = History(0.0, WaitedFor.TURN, 2, [0.0, 0.0])
    server.engine.speculation = SpeculationReport(accepted_per_step=2.5, net_speedup=1.5)
    assert ask(server, stream=stream) == 200
    root, children = tree_of(spans := collector.with_roots(1))
    assert (root.name, root.parent_id, root.error, root.service) == ("chat tiny", CALLER, "", "forebay")
    assert children == ["tokenize", "queue", "prefill", "decode"]
    assert [span.events for span in spans if span.name == "prefill"] == [["chunk", "chunk"]]
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.request.max_tokens"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["forebay.cache.miss_reason"]
    assert root.attributes["forebay.spec.accepted_per_step"] == 2.5
    assert root.attributes.keys() >= {
        *(f"gen_ai.latency.{name}" for name in ("time_to_first_token", "time_in_queue", "e2e")),
        *(f"forebay.{name}" for name in ("retractions", "recomputed_tokens", "server", "weight_version")),
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.cache_read.input_tokens",
    }
    assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"]


def test_latencies_are_exemplars_of_traced_requests_alone(launch: Launch, collector: Collector) -> None:
    server = traced(launch, collector)
    ask(server, headers={})
    assert "trace_id" not in _open_metrics(server)
    ask(server)
    root, _ = tree_of(collector.with_roots(1))
    text = _open_metrics(server)
    families = {family.name: family for family in parse_open_metrics(text)}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds"):
        (exemplar,) = [sample.exemplar for sample in families[f"forebay:{name}"].samples if sample.exemplar]
        assert exemplar.labels == {"trace_id": TRACE, "span_id": root.span_id}
    assert families["forebay:generation_tokens"].samples[0].value == 6


def _open_metrics(server: Running) -> str:
    headers = {"authorization": f"Bearer {KEY}", "accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
    with server.client() as client:
        answer = client.get("/metrics", headers=headers).raise_for_status()
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return answer.text


def test_spans_have_no_text_and_no_key_whatever_the_environment_says(
    launch: Launch, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_SERVER_REQUEST", "authorization,.*")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-the-operator")
    server = traced(launch, collector)
    ask(server, metadata={"note": CANARY}, user=CANARY)
    root, _ = tree_of(collector.with_roots(1))
    assert root.service == "named-by-the-operator"
    assert b"staging" in collector.raw
    assert CANARY.encode() not in collector.raw
    assert KEY.encode() not in collector.raw


def test_refused_request_is_a_root_with_the_code_of_its_error(launch: Launch, collector: Collector) -> None:
    server = traced(launch, collector)
    assert ask(server, temperature=-1) == 400
    root, children = tree_of(collector.with_roots(1))
    assert (children, root.error) == ([], "invalid_value")


def test_aborted_request_leaves_no_span_open(launch: Launch, collector: Collector) -> None:
    server = traced(launch, collector, lambda: FakeEngine(interval_s=0.01))
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        body = b'{"model":"tiny","prompt":[5,6],"max_tokens":5000}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
        head += f"traceparent: {PARENT['traceparent']}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        server.until(lambda: bool(server.engine.running))
    root, children = tree_of(collector.with_roots(1))
    assert root.error == "client_gone"
    assert children[:3] == ["tokenize", "queue", "prefill"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_stream_that_fails_midway_has_the_code_of_its_error(launch: Launch, collector: Collector) -> None:
    server = traced(launch, collector, lambda: FakeEngine(interval_s=0.01))
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 5000, "stream": True}
    headers = {"authorization": f"Bearer {KEY}", **PARENT}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.call(server.engine.fail_all, "step_failed", "why")
        assert any("step_failed" in line for line in lines)
    root, children = tree_of(collector.with_roots(1))
    assert root.error == "step_failed"
    assert children == ["tokenize", "queue", "prefill", "decode"]


def test_line_of_the_log_names_the_trace(
    launch: Launch, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="forebay"):
        ask(traced(launch, collector))
    root, _ = tree_of(collector.with_roots(1))
    (line,) = [text for text in caplog.messages if text.startswith("finished ")]
    assert f"trace_id={TRACE} span_id={root.span_id}" in line


@pytest.mark.parametrize("headers", [{}, {"traceparent": f"00-{TRACE}-{CALLER}-00"}, {"traceparent": "00-zz-1-01"}])
def test_request_whose_caller_does_not_sample_is_not_traced(
    launch: Launch, collector: Collector, headers: dict[str, str]
) -> None:
    server = traced(launch, collector)
    ask(server, headers, max_tokens=2)
    ask(server)
    root, _ = tree_of(collector.with_roots(1))
    assert root.attributes["gen_ai.request.max_tokens"] == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{CALLER}-01", Parent(int(TRACE, 16), int(CALLER, 16), True)),
        (f"00-{TRACE}-{CALLER}-02", Parent(int(TRACE, 16), int(CALLER, 16), False)),
        (f"01-{TRACE}-{CALLER}-01-more", Parent(int(TRACE, 16), int(CALLER, 16), True)),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        ("", None),
    ],
)
def test_traceparent_is_read_as_the_standard_says(value: str, expected: Parent | None) -> None:
    assert parse_traceparent(value.encode()) == expected


def test_collector_that_fails_or_hangs_costs_spans_alone(launch: Launch, collector: Collector) -> None:
    server = traced(launch, collector)
    collector.answers = 400
    assert ask(server) == 200
    collector.with_roots(1)
    with server.client() as client:
        headers = {"authorization": f"Bearer {KEY}"}
        wait_until(
            lambda: 'traces_dropped_total{model_name="tiny"} 5.0' in client.get("/metrics", headers=headers).text
        )
    collector.goes_on.clear()
    assert [ask(server) for _ in range(3)] == [200] * 3
