"""Traces through a router: its span has an attempt for each server that it asked, and theirs are below these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.otlp_collector import CollectedSpan, Collector, collecting
from tests.route.conftest import CLUSTER_KEY, DECODE, PREFILL, start_router
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.served import MODEL
from tests.text.tiny_tokenizer import tiny_tokenizer

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def servers(collector: Collector, *models: object) -> list[Running]:
    traced = {"otlp_traces_endpoint": collector.url, "cluster_key": CLUSTER_KEY}
    return [start(tiny_tokenizer(), FakeEngine, model=model, **traced) for model in models]  # type: ignore[arg-type]


def below(spans: list[CollectedSpan], parent: str) -> list[CollectedSpan]:
    return sorted((span for span in spans if span.parent_id == parent), key=lambda span: span.started)


def test_request_on_a_pair_of_servers_is_one_tree(collector: Collector) -> None:
    prefill, decode = servers(collector, PREFILL, DECODE)
    routed = start_router([prefill], [decode], otlp_traces_endpoint=collector.url)
    try:
        with routed.client() as client:
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3}
            assert client.post("/v1/completions", json=body, headers=PARENT).status_code == 200
        spans = collector.with_roots(3)
    finally:
        for each in (routed, prefill, decode):
            each.close()
    assert {span.trace_id for span in spans} == {TRACE}
    (root,) = below(spans, CALLER)
    assert (root.service, root.kind) == ("forebay-router", 2)
    (attempt,) = below(spans, root.span_id)
    assert attempt.attributes["forebay.servers"] == [prefill.url, decode.url]
    roots = {span.attributes["forebay.server"]: span for span in below(spans, attempt.span_id)}
    assert set(roots) == {"prefill-server", "decode-server"}
    names = {role: [span.name for span in below(spans, span.span_id)] for role, span in roots.items()}
    assert "prefill" in names["prefill-server"]
    assert names["decode-server"] == ["tokenize", "queue", "transfer", "decode"]


def test_request_that_is_tried_again_has_a_span_for_each_attempt(collector: Collector) -> None:
    gone, there = servers(collector, MODEL, MODEL)
    routed = start_router([], [], [gone, there], otlp_traces_endpoint=collector.url)
    try:
        gone.close()
        with routed.client() as client:
            for _ in range(4):  # one of them is sent to the server that has gone
                body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3}
                assert client.post("/v1/completions", json=body, headers=PARENT).status_code == 200
        spans = collector.with_roots(8)
    finally:
        for each in (routed, there):
            each.close()
    tried = [[span.error for span in below(spans, root.span_id)] for root in below(spans, CALLER)]
    assert ["member_lost", ""] in tried
    assert all(errors[-1] == "" for errors in tried)
    answered = [below(spans, span.span_id) for span in spans if span.name == "attempt" and not span.error]
    assert [len(found) for found in answered] == [1] * 4
