"""Panels of dashboards for other engines find what they ask for."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

# As such panels spell them.
QUERIES = {
    "vllm": (
        'vllm:num_requests_running{model_name="$model_name"}',
        'vllm:cache_config_info{block_size="$block", num_gpu_blocks="$blocks"}',  # these two: a Kubernetes gateway's
        'vllm:lora_requests_info{running_lora_adapters="$a", waiting_lora_adapters="$w", max_lora="$m"}',
        'rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[5m])',
        'rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"}[5m])',
        'sum by(le) (increase(vllm:iteration_tokens_total_bucket{model_name="$model_name"}[5m]))',
        'vllm:num_requests_waiting{model_name="$model_name", engine="0"}',
        'vllm:gpu_cache_usage_perc{model_name="$model_name"}',
        'vllm:kv_cache_usage_perc{model_name="$model_name"}',
        'rate(vllm:prompt_tokens_total{model_name="$model_name"}[$__rate_interval])',
        'rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])',
        'histogram_quantile(0.99, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="$m"}[5m])))',
        'rate(vllm:time_per_output_token_seconds_sum{model_name="$model_name"}[5m])',
        'rate(vllm:inter_token_latency_seconds_count{model_name="$model_name"}[5m])',
        'histogram_quantile(0.5, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="$m"}[5m])))',
        'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}[5m]))',
        'sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="$model_name"}[5m]))',
        'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[5m]))',
        'rate(vllm:num_preemptions_total{model_name="$model_name"}[5m])',
        'rate(vllm:prefix_cache_hits_total{model_name="$model_name"}[5m])'
        ' / rate(vllm:prefix_cache_queries_total{model_name="$model_name"}[5m])',
    ),
    "sglang": (
        'sglang:num_running_reqs{model_name=~"$model_name"}',
        'sglang:num_queue_reqs{model_name=~"$model_name"}',
        'sglang:token_usage{model_name=~"$model_name"}',
        'sglang:num_used_tokens{model_name=~"$model_name"}',
        'sglang:cache_hit_rate{model_name=~"$model_name"}',
        'rate(sglang:num_requests_total{model_name=~"$model_name"}[5m])',
        'rate(sglang:generation_tokens_total{model_name=~"$model_name"}[5m])',
        'histogram_quantile(0.95, sum(rate(sglang:time_to_first_token_seconds_bucket{model_name=~"$m"}[5m])) by (le))',
        'histogram_quantile(0.95, sum(rate(sglang:e2e_request_latency_seconds_bucket{model_name=~"$m"}[5m])) by (le))',
        'sum(rate(sglang:inter_token_latency_seconds_bucket{model_name=~"$model_name"}[5m])) by (le)',
    ),
}
# What a Kubernetes gateway reads: the metrics of proposal 003 of the Gateway API inference extension, "Model Server
# Protocol", by the columns of these two engines. A label is named behind its metric.
PROTOCOL = """
| TotalQueuedRequests  | Gauge   | vllm:num_requests_waiting              | sglang:num_queue_reqs   |
| TotalRunningRequests | Gauge   | vllm:num_requests_running              | sglang:num_running_reqs |
| KVCacheUtilization   | Gauge   | vllm:kv_cache_usage_perc               | sglang:token_usage      |
| BlockSize            | Labeled | vllm:cache_config_info block_size      |                         |
| NumGPUBlocks         | Labeled | vllm:cache_config_info num_gpu_blocks  |                         |
"""
ADAPTERS = "vllm:lora_requests_info", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
SERIES = re.compile(r"([a-z]+:[a-z0-9_]+)\{([^}]*)\}")


@pytest.mark.parametrize("engine", QUERIES)
def test_dashboards_find_what_they_query(launch, engine: str) -> None:
    server = launch(metrics_compat=engine)
    server.engine.counters["retractions"] = 2.0
    with server.client() as http:
        http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3}).raise_for_status()
        text = http.get("/metrics").text
    found: dict[str, dict[str, str]] = {}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name], values[sample.name] = sample.labels, sample.value
    for query in QUERIES[engine]:
        asked = SERIES.findall(query)
        assert asked, query
        for name, labels in asked:
            wanted = {label.split("=")[0].strip() for label in labels.split(",")}
            assert wanted <= found[name].keys(), query
            assert found[name]["model_name"] == "tiny"
    assert values[f"{engine}:generation_tokens_total"] == values["forebay:generation_tokens_total"] == 3
    assert values.get("vllm:num_preemptions_total", 2) == 2


@pytest.mark.parametrize("engine", QUERIES)
def test_gateway_finds_the_metrics_of_its_protocol(launch, engine: str) -> None:
    server = launch(metrics_compat=engine)
    with server.client() as http:
        text = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PROTOCOL.strip().splitlines()]
    assert len(rows) == 5
    for _, kind, *columns in rows:
        for metric, label in (cell.split(" ") if " " in cell else (cell, "") for cell in columns if engine in cell):
            family = families[metric]
            (sample,) = family.samples
            assert family.type == "gauge"
            assert (kind == "Labeled") == bool(label)
            assert int(sample.labels[label]) > 0 if label else sample.value >= 0
    name, labels = ADAPTERS
    if engine == "vllm":
        assert labels <= families[name].samples[0].labels.keys()
    (own,) = families["forebay:cache_config_info"].samples
    assert own.labels.keys() >= {"block_size", "num_gpu_blocks"}


def test_nothing_is_told_twice_unasked(shared) -> None:
    with shared.client() as http:
        assert "vllm:" not in http.get("/metrics").text
