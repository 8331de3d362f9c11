"""Metrics repeated under the names that dashboards of other engines query.

No event is counted twice: each series repeats one of Forebay's under another name. A series that Forebay lacks is
absent. Two definitions differ: the time between tokens is the mean of a request, and the share of cached tokens covers
all requests since the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

OURS: Final = "forebay:"

# By our names, without what all begin with: theirs.
NAMES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "vllm": {
        "num_running_reqs": ("num_requests_running",),
        "num_queue_reqs": ("num_requests_waiting",),
        "token_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "engine_retractions": ("num_preemptions",),
        "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
        "cached_tokens": ("prefix_cache_hits",),
        "generation_tokens": ("generation_tokens",),
        "request_success": ("request_success",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_queue_seconds": ("request_queue_time_seconds",),
        "request_prefill_seconds": ("request_prefill_time_seconds",),
        "step_tokens": ("iteration_tokens_total",),
        "cache_config_info": ("cache_config_info",),
    },
    "sglang": {
        "num_running_reqs": ("num_running_reqs",),
        "num_queue_reqs": ("num_queue_reqs",),
        "token_usage": ("token_usage",),
        "kv_used_tokens": ("num_used_tokens",),
        "max_total_num_tokens": ("max_total_num_tokens",),
        "spec_accept_length": ("spec_accept_length",),
        "prompt_tokens": ("prompt_tokens",),
        "cached_tokens": ("cached_tokens",),
        "generation_tokens": ("generation_tokens",),
        "num_aborted_requests": ("num_aborted_requests",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds",),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    },
}


class Renamed(Collector):
    """The series of a registry under the names of another engine, with the labels that its dashboards select by."""

    def __init__(self, registry: CollectorRegistry, engine: str, model: str) -> None:
        self._registry, self._engine, self._model = registry, engine, model
        self._labels = {"model_name": model} | ({"engine": "0"} if engine == "vllm" else {})

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry then does not collect at registration, when there are no values yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield our metrics under the other engine's names; for SGLang, those that sum several of ours as well."""
        ours = {metric.name.removeprefix(OURS): metric for metric in self._registry.collect()}
        for name, others in NAMES[self._engine].items():
            if name in ours:
                yield from (self._renamed(ours[name], f"{self._engine}:{other}") for other in others)
        if self._engine == "sglang":
            yield from self._sums(ours)
        if self._engine == "vllm":
            yield self._adapters(ours)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        renamed.samples = [
            sample._replace(name=name + sample.name.removeprefix(metric.name), labels={**self._labels, **sample.labels})
            for sample in metric.samples
        ]
        return renamed

    def _adapters(self, ours: Mapping[str, Metric]) -> Metric:
        """Return vLLM's gauge whose labels name the adapters in use, for gateways; adapters do not wait here."""
        samples = ours["lora_requests"].samples if "lora_requests" in ours else []
        in_use = ",".join(sample.labels["adapter"] for sample in samples if sample.value)
        labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=[*self._labels, *labels])
        info.add_metric([*self._labels.values(), in_use, "", str(len(samples))], time.time())
        return info

    def _sums(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        """Yield sums that other engines have as one number, and we by its parts."""
        total = {
            name: sum(sample.value for sample in ours[name].samples if sample.name.endswith("_total"))
            for name in ("request_success", "prompt_tokens", "cached_tokens")
        }
        requests = CounterMetricFamily("sglang:num_requests", "Choices ended", labels=["model_name"])
        requests.add_metric([self._model], total["request_success"])
        rate = GaugeMetricFamily(
            "sglang:cache_hit_rate", "Prompt tokens that were cached, of all", labels=["model_name"]
        )
        rate.add_metric([self._model], total["cached_tokens"] / max(1.0, total["prompt_tokens"]))
        yield from (requests, rate)
