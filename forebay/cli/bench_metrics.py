"""From what a client saw of each request to the figures of a benchmark, by `vllm bench serve`'s names and definitions.

TTFT: from sending the request to the first event with a token. TPOT: the time from there to the last such event, per
token after the first. ITL: between two such events of one stream. E2EL: from sending the request to the end of its
answer. All as the client's clock has them, which reads an event's time when the read that completes it returns; a read
may bring several events. Throughput is over the time from the first request to the end of the last answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Rows = list[tuple[str, float | int | None]]  # None: a heading


@dataclass(slots=True)
class Sample:
    """One request; times in seconds of one monotonic clock. `arrivals` has one entry per event with tokens."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Latencies in milliseconds, one entry per request (of ITL, per pair of events). `client_cpu_seconds` is what the
    client itself used of the machine in `seconds`."""

    seconds: float
    client_cpu_seconds: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    latencies_ms: dict[str, Sequence[float]]
    errors: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with vLLM's keys."""
        result: dict[str, Any] = {
            "duration": self.seconds,
            "completed": self.completed,
            "failed": len(self.errors),
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "client_cpu_share": self.client_cpu_seconds / self.seconds,
            "request_throughput": self.completed / self.seconds,
            "output_throughput": self.total_output_tokens / self.seconds,
            "total_token_throughput": (self.total_input_tokens + self.total_output_tokens) / self.seconds,
        }
        for name, values in self.latencies_ms.items():
            result |= {f"{kind}_{name}_ms": value for kind, value in _centre(values).items()}
        return result

    def rows(self) -> Rows:
        figures = self.as_dict()
        rows: Rows = [
            ("Successful requests:", self.completed),
            ("Failed requests:", len(self.errors)),
            ("Benchmark duration (s):", self.seconds),
            ("Total input tokens:", self.total_input_tokens),
            ("Total generated tokens:", self.total_output_tokens),
            ("Request throughput (req/s):", figures["request_throughput"]),
            ("Output token throughput (tok/s):", figures["output_throughput"]),
            ("Total token throughput (tok/s):", figures["total_token_throughput"]),
            ("Client's share of a core (%):", 100 * figures["client_cpu_share"]),
        ]
        for name, title in _TITLES.items():
            rows.append((title, None))
            short = name.upper()
            rows += [(f"{kind.capitalize()} {short} (ms):", figures[f"{kind}_{name}_ms"]) for kind in _KINDS]
        return rows


_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_KINDS = ("mean", "median", "p99")


def summarize(samples: Sequence[Sample], seconds: float, client_cpu_seconds: float = 0.0) -> Figures:
    """Failed requests count as failed and in no other figure."""
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    latencies = {
        "ttft": [sample.arrivals[0] - sample.sent for sample in good],
        "tpot": [
            (sample.arrivals[-1] - sample.arrivals[0]) / (sample.num_output_tokens - 1)
            for sample in good
            if sample.num_output_tokens > 1
        ],
        "itl": [after - before for sample in good for before, after in pairwise(sample.arrivals)],
        "e2el": [sample.ended - sample.sent for sample in good],
    }
    return Figures(
        seconds=seconds,
        client_cpu_seconds=client_cpu_seconds,
        completed=len(good),
        total_input_tokens=sum(sample.num_prompt_tokens for sample in good),
        total_output_tokens=sum(sample.num_output_tokens for sample in good),
        latencies_ms={name: [1e3 * float(value) for value in values] for name, values in latencies.items()},
        errors=[sample.error or "no token came" for sample in samples if sample.error or not sample.arrivals],
    )


def _centre(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(_KINDS, 0.0)
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }
