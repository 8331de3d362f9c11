"""What /metrics says, in the field's names with our prefix.

The server's own counters and histograms are kept here; the engine's come from its `State` at the time of the scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.engine.frames import Occupied, Ready, State
from forebay.memory.miss_reason import MissReason
from forebay.server.answering.generation import Generation
from forebay.server.operations.metrics_compat import NAMES, Renamed
from forebay.server.pooling.prompts import Batch

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INTERVALS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

# By the names in `State.counters`; `scheduler/scheduler.py` and `engine/stats.py` say when they grow. What the server
# counts itself (requests, finish reasons, prompt and cached tokens) is not here: two counts of one thing differ.
_ENGINE_COUNTERS: Final = {
    "recomputed_tokens": "Tokens computed once more after their choice was retracted",
    "computed_prompt_tokens": "Tokens that went through the model as part of a prompt",
    "generated_tokens": "Tokens sampled so far, those of running choices included",
    "draft_tokens": "Tokens guessed and verified",
    "accepted_tokens": "Tokens guessed, verified and right",
    "retractions": "Times that a running choice gave its pages up and waited again",
    "retractions_kept": "Retractions whose KV and state were kept on the host",
    "states_taken": "States written down for the prefix cache",
    "states_skipped": "States that were wanted and had no slot",
    "states_evicted": "States dropped from the prefix cache to make room",
    "evicted_pages": "Pages dropped from the prefix cache to make room",
    "leaked_pages": "Pages that nobody owned and that were set aside",
    "ledger_violations": "Slots that were freed, taken or used against the rules",
    "engine.steps": "Steps that the engine committed",
    "engine.step_failures": "Steps that cost their choices an error",
    "engine.refused": "Choices that the engine refused before they were queued",
    "engine.host_seconds": "Seconds spent planning and committing steps",
    "engine.busy_seconds": "Seconds spent in steps, the model's part included",
}


_TRANSFERS: Final = {
    "pending": "Requests that wait for their other half",
    "transferring": "Requests that wait for what is on its way",
    "open": "Tickets of transfers that are not closed",
    "unfenced": "Broken tickets whose places another engine may still write to",
    "rejected": "Sessions with another engine that ended because of a message that could not be handled",
}


class Metrics:
    """One registry per server, so that two servers in one process do not meet; `compat` names the engine under whose
    names all is told once more, or is "none"."""

    def __init__(self, model: str, compat: str = "none") -> None:
        self._registry = CollectorRegistry()
        self._once_more = CollectorRegistry()
        if compat in NAMES:
            self._once_more.register(Renamed(self._registry, compat, model))
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._model = model

        def counters(name: str, text: str, label: str) -> Counter:
            return Counter(f"forebay:{name}", text, ["model_name", label], registry=self._registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"forebay:{name}", text, ["model_name"], registry=self._registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"forebay:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(model)

        finished = "Choices ended, whatever the end, by finish reason"
        refused = "Requests answered with an error before their first token, by code"
        cached = "Prompt tokens of ended requests that came from the prefix cache"
        self._finished = counters("request_success", finished, "finished_reason")
        self._requests = counters("requests", "Requests that generated, by route", "route")
        self._refused = counters("requests_refused", refused, "code")
        self._aborted = counter("num_aborted_requests", "Requests whose client went away before they ended")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests, cached ones included")
        self._cached_tokens = counter("cached_tokens", cached)
        self._generated = counter("generation_tokens", "Tokens generated by ended requests")
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request, each prompt once", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Tokens generated by a request", _TOKENS)
        self._ttft = histogram("time_to_first_token_seconds", "From a request's headers to its first token", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's headers to its end", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Mean time between a request's tokens", _INTERVALS)

    def count_error(self, code: str) -> None:
        self._refused.labels(self._model, code).inc()

    def count_generation(self, generation: Generation, now: float, route: str) -> None:
        """An ended generation, however it ended."""
        usage = generation.usage()
        self._requests.labels(self._model, route).inc()
        for choice in generation.choices:
            self._finished.labels(self._model, choice.finish or "abort").inc()
        if generation.disconnected:
            self._aborted.inc()
        self._prompt_tokens.inc(usage["prompt_tokens"])
        self._cached_tokens.inc(usage["cache"]["cached_tokens"])
        self._generated.inc(usage["completion_tokens"])
        self._prompt_sizes.observe(usage["prompt_tokens"])
        self._output_sizes.observe(usage["completion_tokens"])
        self._e2e.observe(now - generation.started_at)
        first, last = generation.first_token_at, generation.last_token_at
        if first is not None and last is not None:
            self._ttft.observe(first - generation.started_at)
            longest = max(choice.num_tokens for choice in generation.choices)
            if longest > 1:
                self._itl.observe((last - first) / (longest - 1))

    def count_pooled(self, batch: Batch, now: float) -> None:
        """Prompts behind which nothing is generated, however they ended."""
        num_ended = len(batch.vectors)
        self._finished.labels(self._model, "stop").inc(num_ended)
        if num_ended < len(batch.prompts):
            self._finished.labels(self._model, "abort" if batch.aborted else "error").inc(
                len(batch.prompts) - num_ended
            )
        if batch.aborted:
            self._aborted.inc()
        num_tokens = sum(map(len, batch.prompts))
        self._prompt_tokens.inc(num_tokens)
        self._prompt_sizes.observe(num_tokens)
        self._cached_tokens.inc(sum(vector.cache.cached_tokens for vector in batch.vectors.values()))
        self._e2e.observe(now - batch.started_at)

    def render(self, state: State | None, info: Ready | None) -> bytes:
        """The exposition text; without a state only the server's own part."""
        self._engine.state, self._engine.info = state, info
        return generate_latest(self._registry) + generate_latest(self._once_more)


class _EngineCollector(Collector):
    state: State | None = None
    info: Ready | None = None

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        state = self.state
        if state is None:
            return
        yield _gauge("num_running_reqs", "Requests running", state.num_running)
        yield _gauge("num_queue_reqs", "Requests waiting", state.num_waiting)
        yield _gauge("num_queue_tokens", "Prompt tokens waiting", state.num_waiting_tokens)
        yield _gauge("oldest_wait_seconds", "Age of the oldest waiting request", state.oldest_wait_s)
        yield _gauge("last_step_age_seconds", "Since a step last completed, 0 when idle", state.last_step_age_s)
        slots = GaugeMetricFamily("forebay:pool_slots", "Slots of a pool, by who holds them", labels=["pool", "holder"])
        total = GaugeMetricFamily("forebay:pool_size", "Slots of a pool", labels=["pool"])
        usage = GaugeMetricFamily("forebay:pool_usage", "Share of a pool that running requests hold", labels=["pool"])
        for pool in state.pools:
            for holder in ("free", "running", "cached", "quarantined"):
                slots.add_metric([pool.name, holder], getattr(pool, holder))
            total.add_metric([pool.name], pool.total)
            usage.add_metric([pool.name], pool.running / max(1, pool.total))
        yield from (slots, total, usage)
        yield from self._tokens(state)
        yield _misses(state)
        whole = state.counters.get(f"misses.{MissReason.NONE}", 0)
        yield CounterMetricFamily("forebay:cache_hit", "Choices whose prompt came whole from the prefix cache", whole)
        if state.speculation is not None:
            recent = state.speculation.recent
            yield _gauge(
                "spec_width", "Most tokens that a request had verified in the last step", state.speculation.width
            )
            yield _gauge("spec_accept_length", "Tokens of a request by recent decode step", recent.accepted_per_step)
            yield _gauge("spec_net_speedup", "Recent tokens per second by those without guesses", recent.net_speedup)
        yield from _memory(state.memory)
        if state.transfers is not None:
            for name, text in _TRANSFERS.items():
                yield _gauge(f"transfers_{name}", text, getattr(state.transfers, name))
        dead = state.counters.get("dead_kv_tokens", 0)
        yield _gauge("dead_kv_tokens", "Cached KV tokens with no state left to go on from", dead)
        for name, text in _ENGINE_COUNTERS.items():
            if name in state.counters:
                metric = f"forebay:engine_{name.removeprefix('engine.').replace('.', '_')}"
                yield CounterMetricFamily(metric, text, state.counters[name])

    def _tokens(self, state: State) -> Iterator[Metric]:
        """The KV pool in tokens, under the names that dashboards know."""
        kv = next((pool for pool in state.pools if pool.name == "kv"), None)
        if kv is None or self.info is None:
            return
        size = self.info.page_size
        yield _gauge("token_usage", "Share of the KV pool that running requests hold", kv.running / max(1, kv.total))
        yield _gauge("kv_used_tokens", "KV tokens held by running requests", kv.running * size)
        yield _gauge("kv_available_tokens", "KV tokens free", kv.free * size)
        yield _gauge("kv_evictable_tokens", "KV tokens in the prefix cache", kv.cached * size)
        yield _gauge("max_total_num_tokens", "KV tokens in all", self.info.max_total_tokens)


def _memory(memory: Occupied) -> Iterator[Metric]:
    yield _gauge(
        "engine_serving", "1 while requests go on, 0 while it is asleep or on its way", memory.phase == "serving"
    )
    held = GaugeMetricFamily(
        "forebay:memory_bytes", "Memory that can be released, by tag; 0 while it is", labels=["tag"]
    )
    for tag, num_bytes in memory.num_bytes.items():
        held.add_metric([tag], 0 if tag in memory.released else num_bytes)
    yield held
    yield _gauge("weight_version", "Times that the weights were updated", memory.weight_version)
    yield _gauge("last_sleep_seconds", "How long the last release of memory took", memory.last_sleep_s)
    yield _gauge("last_wake_seconds", "How long it took the last time to have memory again", memory.last_wake_s)
    yield _gauge(
        "kept_cache_tokens", "Of the prefix cache in host memory while the caches are released", memory.kept_tokens
    )
    yield _gauge("kept_cache_bytes", "The same in bytes", memory.kept_bytes)


def _misses(state: State) -> CounterMetricFamily:
    text = "Choices whose prompt was not wholly taken from the prefix cache when they first ran, by why not"
    family = CounterMetricFamily("forebay:cache_miss", text, labels=["reason"])
    for reason in MissReason:
        if reason is not MissReason.NONE:
            family.add_metric([reason], state.counters.get(f"misses.{reason}", 0))
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"forebay:{name}", text, value)
