"""From what a client saw of each request to the figures of a benchmark, by `vllm bench serve`'s names and definitions.

TTFT: from sending the request to the first event with a token. TPOT: the time from there to the last such event, per
token after the first. ITL: between two such events of one stream. E2EL: from sending the request to the end of its
answer. A request is good where each of these is within its limit. All as the client's clock has them, which reads an
event's time when the read that completes it returns; a read may bring several events. Throughput is over the time from
the first request to the end of the last answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

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
    latencies_ms: Mapping[str, Sequence[float]]
    errors: list[str]
    num_good: int | None  # within all limits; None where none are set
    peak_requests: int  # at once
    percentiles: Sequence[float]

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
            "max_concurrent_requests": self.peak_requests,
        }
        if self.num_good is not None:
            result["request_goodput"] = self.num_good / self.seconds
        for name, values in self.latencies_ms.items():
            result |= {f"{kind}_{name}_ms": value for kind, value in _centre(values, self.percentiles).items()}
        return result

    def rows(self, metrics: Sequence[str]) -> Rows:
        """`metrics` are the latencies to show."""
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
            ("Peak concurrent requests:", self.peak_requests),
            ("Client's share of a core (%):", 100 * figures["client_cpu_share"]),
        ]
        if "request_goodput" in figures:
            rows.insert(6, ("Request goodput (req/s):", figures["request_goodput"]))
        kinds = _centre((), self.percentiles)
        for name in metrics:
            rows.append((LATENCIES[name], None))
            short = name.upper()
            rows += [(f"{kind.capitalize()} {short} (ms):", figures[f"{kind}_{name}_ms"]) for kind in kinds]
        return rows


LATENCIES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def _by_name(samples: Sequence[Sample], each: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the latencies of all `samples` in ms, by name; `each` has those of one sample."""
    latencies = {name: [one[name] for one in each if name in one] for name in ("ttft", "tpot")}
    latencies["itl"] = [1e3 * (after - before) for sample in samples for before, after in pairwise(sample.arrivals)]
    latencies["e2el"] = [one["e2el"] for one in each]
    return latencies


def _is_within(latencies: Mapping[str, float], limits_ms: Mapping[str, float]) -> bool:
    return all(latencies.get(name, 0.0) <= limit for name, limit in limits_ms.items())


def _errors(samples: Sequence[Sample]) -> list[str]:
    return [sample.error or "no token came" for sample in samples if sample.error or not sample.arrivals]


def summarize(
    samples: Sequence[Sample],
    seconds: float,
    client_cpu_seconds: float = 0.0,
    *,
    limits_ms: Mapping[str, float] = {},
    percentiles: Sequence[float] = (99.0,),
) -> Figures:
    """Failed requests count as failed and in no other figure but the peak. `limits_ms` are of TTFT, TPOT and E2EL."""
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    each = [_latencies(sample) for sample in good]
    return Figures(
        seconds=seconds,
        client_cpu_seconds=client_cpu_seconds,
        completed=len(good),
        total_input_tokens=sum(sample.num_prompt_tokens for sample in good),
        total_output_tokens=sum(sample.num_output_tokens for sample in good),
        latencies_ms=_by_name(good, each),
        num_good=sum(_is_within(one, limits_ms) for one in each) if limits_ms else None,
        peak_requests=_peak(samples),
        percentiles=percentiles,
        errors=_errors(samples),
    )


def _latencies(sample: Sample) -> dict[str, float]:
    """Return the latencies of one request, in milliseconds; one token has no TPOT."""
    first, last, more = sample.arrivals[0], sample.arrivals[-1], sample.num_output_tokens - 1
    found = {"ttft": 1e3 * (first - sample.sent), "e2el": 1e3 * (sample.ended - sample.sent)}
    return found | ({"tpot": 1e3 * (last - first) / more} if more > 0 else {})


def _peak(samples: Sequence[Sample]) -> int:
    """Return the largest number of requests under way at once: a request that ends as another begins does not overlap
    it."""
    moments = sorted([(sample.sent, 1) for sample in samples] + [(sample.ended, -1) for sample in samples])
    return max(accumulate(step for _, step in moments), default=0)


def _centre(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    there = values or (0.0,)
    shares = {f"p{share:g}": float(np.percentile(there, share)) for share in percentiles}
    return {"mean": float(np.mean(there)), "median": float(np.median(there)), **shares}
