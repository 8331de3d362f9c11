"""The rows of the target table: what is asked of a server, which figure counts, the goal and the best peer known.

The peers' figures in `best` were measured beforehand on the same kind of machine (2 cores with AMX); a run with peers
puts those of the same hour beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Figure = Callable[[dict[str, Any]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One `forebay bench serve`: lengths in tokens, arrivals a second, infinitely many for None."""

    num_prompts: int
    concurrency: int
    input_len: int = 128
    input_max: int | None = None
    prefix_len: int = 0
    output_len: int = 128
    request_rate: float | None = None

    def flags(self) -> list[str]:
        flags = {
            "num-prompts": self.num_prompts,
            "max-concurrency": self.concurrency,
            "random-input-len": self.input_len,
            "random-input-max": self.input_max,
            "random-prefix-len": self.prefix_len,
            "random-output-len": self.output_len,
            "request-rate": self.request_rate,
        }
        return [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]

    def shrunk(self) -> Load:
        """The same kind of load in a moment: to see that everything works, not for figures."""
        return replace(
            self,
            num_prompts=min(self.num_prompts, 4),
            concurrency=min(self.concurrency, 4),
            output_len=min(self.output_len, 8),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`load` is None for what a start alone tells; `figure` then reads the start's measurements."""

    name: str
    title: str
    unit: str
    target: float
    best: float
    best_peer: str
    load: Load | None
    figure: Figure
    lower_is_better: bool = False

    def is_better(self, value: float, than: float) -> bool:
        return value < than if self.lower_is_better else value > than

    def share_of_target(self, value: float) -> float:
        """1 where the target is just met, more where it is passed."""
        return self.target / value if self.lower_is_better else value / self.target


def output_rate(result: dict[str, Any]) -> float:
    return float(result["output_throughput"])


def input_rate(result: dict[str, Any]) -> float:
    return float(result["total_input_tokens"] / result["duration"])


def key(name: str) -> Figure:
    return lambda result: float(result[name])


def streams(concurrency: int, num_prompts: int, target: float, best: float, best_peer: str) -> Row:
    plural = "s" if concurrency > 1 else ""
    return Row(
        name=f"streams-{concurrency}",
        title=f"{concurrency} stream{plural}, 128 in, 128 out",
        unit="tok/s",
        target=target,
        best=best,
        best_peer=best_peer,
        load=Load(num_prompts=num_prompts, concurrency=concurrency),
        figure=output_rate,
    )


def shared_prefix(concurrency: int, target: float, best: float, best_peer: str) -> Row:
    return Row(
        name=f"shared-{concurrency}",
        title=f"1,000 shared + 50 new in, 64 out, {concurrency} streams",
        unit="tok/s",
        target=target,
        best=best,
        best_peer=best_peer,
        load=Load(num_prompts=2 * concurrency, concurrency=concurrency, input_len=1050, prefix_len=1000, output_len=64),
        figure=output_rate,
    )


def prefill(title: str, concurrency: int, target: float, best: float, best_peer: str) -> Row:
    return Row(
        name=f"prefill-{concurrency}",
        title=title,
        unit="tok/s",
        target=target,
        best=best,
        best_peer=best_peer,
        load=Load(num_prompts=8, concurrency=concurrency, input_len=512, output_len=1),
        figure=input_rate,
    )


# Rows of up to 16 streams come first: a server that must know their number is then started twice at most.
ROWS = (
    Row(
        name="start",
        title="start to first token",
        unit="s",
        target=1.5,
        best=0.5,
        best_peer="llama.cpp",
        load=None,
        figure=key("first_token_s"),
        lower_is_better=True,
    ),
    Row(
        name="memory",
        title="resident memory, idle",
        unit="MB",
        target=600,
        best=362,
        best_peer="OpenVINO int4",
        load=None,
        figure=key("idle_pss_mb"),
        lower_is_better=True,
    ),
    streams(1, 6, 300, 162, "llama.cpp Q4_0"),
    streams(4, 8, 800, 227, "llama.cpp"),
    streams(16, 32, 2000, 617, "OpenVINO"),
    Row(
        name="first-token",
        title="time to first token, one stream, 128 in",
        unit="ms",
        target=30,
        best=44,
        best_peer="vLLM CPU",
        load=Load(num_prompts=10, concurrency=1, output_len=16),
        figure=key("median_ttft_ms"),
        lower_is_better=True,
    ),
    Row(
        name="between-tokens",
        title="p99 between tokens, 16 streams, prompts arriving",
        unit="ms",
        target=15,
        best=33,
        best_peer="OpenVINO",
        # The first 16 start within a second and later ones as these end, so that prompts come while others generate.
        load=Load(num_prompts=64, concurrency=16, request_rate=24.0),
        figure=key("p99_itl_ms"),
        lower_is_better=True,
    ),
    prefill("prefill, one 512-token prompt", 1, 6000, 4365, "OpenVINO"),
    prefill("prefill, eight at once", 8, 7500, 5650, "vLLM CPU"),
    shared_prefix(16, 1000, 350, "OpenVINO"),
    streams(64, 128, 3000, 1049, "vLLM CPU"),
    shared_prefix(64, 1500, 569, "vLLM CPU"),
    Row(
        name="offline",
        title="256 requests at once, 128-512 in, 128 out",
        unit="tok/s",
        target=2000,
        best=938,
        best_peer="vLLM CPU",
        load=Load(num_prompts=256, concurrency=256, input_len=128, input_max=512),
        figure=output_rate,
    ),
)
