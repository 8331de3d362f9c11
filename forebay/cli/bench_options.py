"""Options of the benchmarks of vLLM and SGLang, read for `forebay bench serve`: backends, datasets, percentiles and
goodput."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any, Final

from forebay.base.errors import ConfigError
from forebay.bench.metrics import LATENCIES
from forebay.bench.prompts import CHAT, COMPLETIONS
from forebay.cli.arguments import Parser, note, number, whole

# All of them speak OpenAI's API, of which a load needs the route alone.
BACKENDS: Final = {
    **dict.fromkeys(("forebay", "openai", "vllm", "sglang", "sglang-oai", "lmdeploy", "llama.cpp"), COMPLETIONS),
    **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat"), CHAT),
}
DATASETS: Final = ("random", "sharegpt")


def add_options(parser: Parser) -> None:
    """Add the options that `vllm bench serve` and SGLang's benchmark have besides ours."""
    parser.option("--backend", type=_backend, default="forebay", metavar="NAME", help="what kind of server it is")
    parser.option("--endpoint", type=_one_of("endpoint", (COMPLETIONS, CHAT)), metavar="PATH", help="the route",
                  default_text="the backend's")  # fmt: skip
    parser.option("--dataset-name", type=_one_of("dataset", DATASETS), default=DATASETS[0], metavar="NAME",
                  help="random tokens, or sharegpt: conversations of a file")  # fmt: skip
    parser.option("--dataset-path", metavar="FILE", help="of sharegpt: JSON as it is published")
    parser.option("--sharegpt-output-len", type=whole(1), metavar="N", help="tokens to generate for each",
                  default_text="as many as the answer there has")  # fmt: skip
    parser.option("--burstiness", type=number(0.001), default=1.0, metavar="X",
                  help="1 is Poisson; less comes in bursts, more evenly")  # fmt: skip
    parser.option("--percentile-metrics", type=_metrics, default=tuple(LATENCIES), metavar="A,B",
                  help="latencies to show", default_text=",".join(LATENCIES))  # fmt: skip
    parser.option("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="A,B",
                  help="percentiles of each", default_text="99")  # fmt: skip
    parser.option("--goodput", nargs="+", metavar="METRIC:MS", help="count requests within limits, such as ttft:500")
    parser.option("--tokenizer", metavar="NAME", help="not needed: prompts are ids, and texts the server counts")


def route(own: Any) -> str:
    """Where the requests go. ConfigError for what nothing can be made of."""
    if own.tokenizer is not None:
        note("--tokenizer is not needed: random prompts are token ids, and texts are counted by the server")
    found: str = own.endpoint or BACKENDS[own.backend]
    if own.dataset_name == "sharegpt" and own.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path FILE, which is not fetched here")
    if own.dataset_name == "random" and found == CHAT:
        instead = f"use --endpoint {COMPLETIONS} (--backend openai), or --dataset-name sharegpt"
        raise ConfigError(f"{CHAT} takes texts, and random prompts are token ids: {instead}")
    return found


def limits(own: Any) -> dict[str, float]:
    """Return the upper limit in milliseconds of each metric. ConfigError for a text that is no such pair."""
    found = {}
    for pair in own.goodput or ():
        metric, _, text = pair.partition(":")
        if metric not in LATENCIES or metric == "itl" or not text.replace(".", "", 1).isdigit():
            raise ConfigError(f"--goodput: {pair!r} is no limit: write ttft:MS, tpot:MS or e2el:MS")
        found[metric] = float(text)
    return found


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ArgumentTypeError(f"{text!r} is not spoken here, OpenAI's API is: use openai or openai-chat")
    return text


def _one_of(what: str, known: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"the {what} {text!r} is not known here: use {' or '.join(known)}")
        return text

    return read


def _metrics(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in found if name not in LATENCIES]:
        raise ArgumentTypeError(f"{unknown[0]!r} is none: there are {', '.join(LATENCIES)}")
    return found


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value <= 100 for value in found):
        raise ArgumentTypeError(f"{text!r} are no percentiles: write such as 50,90,99")
    return found
