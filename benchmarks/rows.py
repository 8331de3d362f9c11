"""The rows of the target table: what is asked of a server, which figure counts, and what it is to be against peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Figure = Callable[[Mapping[str, Any]], float]


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

    @property
    def longest(self) -> int:
        """Tokens of the longest request, and a page more."""
        return (self.input_max or self.input_len) + self.output_len + 16

    @property
    def mean_input_len(self) -> float:
        return (self.input_len + (self.input_max or self.input_len)) / 2

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


class Goal(NamedTuple):
    """How many times as fast as the best format of a peer, by what the instruction set has: products of bytes in 512
    bits, less, or tiles."""

    peer: str
    vnni: float
    avx2: float
    amx: float

    def ratio(self, needs: frozenset[str]) -> float:
        return self.amx if "amx_bf16" in needs else self.vnni if "avx512_vnni" in needs else self.avx2


class Bound(NamedTuple):
    """What our figure is to stay below: so many of `unit`, each of them `of` the same run. `amx` where there are
    tiles."""

    most: float
    amx: float
    unit: str
    of: Figure = lambda result: 1.0

    def limit(self, needs: frozenset[str]) -> float:
        return self.amx if "amx_bf16" in needs else self.most


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`load` is None for what a start alone tells; `figure` then reads the start's measurements. `model` is one of a
    server's (`kinds.Kind.models`). `goals` are against peers, `bound` is against nobody."""

    name: str
    title: str
    unit: str
    load: Load | None
    figure: Figure
    model: str = "default"
    goals: tuple[Goal, ...] = ()
    bound: Bound | None = None
    lower_is_better: bool = False

    def ratio(self, value: float, to: float) -> float:
        """How many times as good: above 1 where `value` is better."""
        return to / value if self.lower_is_better else value / to


def output_rate(result: Mapping[str, Any]) -> float:
    return float(result["output_throughput"])


def input_rate(result: Mapping[str, Any]) -> float:
    return float(result["total_input_tokens"] / result["duration"])


def key(name: str) -> Figure:
    return lambda result: float(result[name])


def streams(concurrency: int, num_prompts: int, *goals: Goal, model: str = "default", output_len: int = 128) -> Row:
    about = {"default": ("streams", ""), "1b": ("q4_k_m", "1B in Q4_K_M, "), "hybrid": ("hybrid", "hybrid, ")}
    about |= {"4b": ("4b", "4B in Q4_K_M, "), "8b": ("8b", "8B in Q4_K_M, "), "moe": ("moe", "experts in Q4_K_M, ")}
    about |= {"gpt-oss": ("gpt-oss", "experts in MXFP4, ")}
    name, kind = about[model]
    return Row(
        name=f"{name}-{concurrency}",
        title=f"{kind}{concurrency} stream{'s' if concurrency > 1 else ''}, 128 in, {output_len} out",
        unit="tok/s",
        model=model,
        goals=goals,
        load=Load(num_prompts=num_prompts, concurrency=concurrency, output_len=output_len),
        figure=output_rate,
    )


def shared_prefix(concurrency: int) -> Row:
    return Row(
        name=f"shared-{concurrency}",
        title=f"1,000 shared + 50 new in, 64 out, {concurrency} streams",
        unit="tok/s",
        load=Load(num_prompts=2 * concurrency, concurrency=concurrency, input_len=1050, prefix_len=1000, output_len=64),
        figure=output_rate,
    )


def prefill(title: str, concurrency: int) -> Row:
    return Row(
        name=f"prefill-{concurrency}",
        title=title,
        unit="tok/s",
        goals=(Goal("llama.cpp", 1, 1, 1), Goal("OpenVINO", 1, 1, 1.4)),
        load=Load(num_prompts=max(4, concurrency), concurrency=concurrency, input_len=512, output_len=1),
        figure=input_rate,
    )


def real_size(model: str, alone: Goal) -> Iterator[Row]:
    """Rows of a model whose streams, prompts and context are those of real use; `alone` is the goal of one stream."""
    yield streams(1, 1, alone, model=model, output_len=32)
    yield streams(4, 4, Goal("llama.cpp", 1.8, 1.8, 1.8), model=model, output_len=32)
    yield streams(16, 16, Goal("llama.cpp", 2.5, 2.5, 2.5), model=model, output_len=32)
    prompt = replace(prefill(f"{model}, one 512-token prompt", 1), name=f"{model}-prefill", model=model)
    yield replace(prompt, goals=(Goal("llama.cpp", 1, 1, 1),))
    prompt = replace(prompt, name=f"{model}-prefill-4k", title=f"{model}, one 4,096-token prompt")
    yield replace(prompt, load=Load(num_prompts=1, concurrency=1, input_len=4096, output_len=1))
    yield from behind(model)


def behind(model: str) -> Iterator[Row]:
    """Rows of tokens that are generated behind a context, which ends at 32,768 in these models."""
    for length in (1, 8, 32):
        yield Row(
            name=f"{model}-{length}k",
            title=f"{model}, decode behind {length * 1000:,} tokens",
            unit="tok/s",
            model=model,
            goals=(Goal("llama.cpp", 1.5, 1.5, 1.5),) if length == 32 else (),
            load=Load(num_prompts=1, concurrency=1, input_len=length * 1000, output_len=32),
            figure=lambda result: 1000 / float(result["median_tpot_ms"]),
        )


# Loads are short, and repeated: a busy machine leaves moments alone, not minutes.
# A server that must know the number of its streams is started again for more than 16, as all are for another model.
ROWS = (
    Row(
        name="start",
        title="start to first token (second start)",
        unit="s",
        load=None,
        figure=key("first_token_s"),
        bound=Bound(2.0, 1.5, " s"),
        lower_is_better=True,
    ),
    Row(
        name="memory",
        title="resident memory, idle",
        unit="MB",
        load=None,
        figure=key("idle_pss_mb"),
        lower_is_better=True,
    ),
    streams(1, 2, Goal("llama.cpp", 1.5, 1.2, 1.5)),
    streams(4, 4, Goal("llama.cpp", 2.5, 2, 3)),
    streams(16, 16, Goal("llama.cpp", 4, 3, 6), Goal("OpenVINO", 1.5, 1.3, 2)),
    Row(
        name="first-token",
        title="time to first token, one stream, 128 in",
        unit="ms",
        goals=(Goal("llama.cpp", 1, 1, 1),),
        load=Load(num_prompts=5, concurrency=1, output_len=2),
        figure=key("median_ttft_ms"),
        lower_is_better=True,
    ),
    Row(
        name="between-tokens",
        title="p99 between tokens, 16 streams, prompts arriving",
        unit="ms",
        # The first 16 start within a second and later ones as these end, so that prompts come while others generate.
        load=Load(num_prompts=64, concurrency=16, request_rate=24.0),
        figure=key("p99_itl_ms"),
        bound=Bound(2.0, 2.0, "x the median step", of=key("median_itl_ms")),
        lower_is_better=True,
    ),
    prefill("prefill, one 512-token prompt", 1),
    prefill("prefill, eight at once", 8),
    shared_prefix(16),
    streams(64, 64, Goal("OpenVINO", 1.5, 1.3, 2)),
    shared_prefix(64),
    Row(
        name="offline",
        title="256 requests at once, 128-512 in, 128 out",
        unit="tok/s",
        load=Load(num_prompts=256, concurrency=256, input_len=128, input_max=512),
        figure=output_rate,
    ),
    streams(1, 2, Goal("llama.cpp", 1.2, 1.1, 1.2), model="1b", output_len=64),
    streams(16, 16, Goal("llama.cpp", 3, 2, 4), model="1b", output_len=64),
    streams(1, 2, model="hybrid", output_len=64),
    streams(16, 16, model="hybrid", output_len=64),
    # Of models that are made only if they are named (`benchmarks.peers.install --models`).
    *(row for model in ("4b", "8b") for row in real_size(model, Goal("llama.cpp", 1.15, 1.15, 1.15))),
    *(row for model in ("moe", "gpt-oss") for row in real_size(model, Goal("llama.cpp", 1.5, 1.5, 1.5))),
    *behind("long"),
)
