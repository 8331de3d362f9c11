"""`forebay bench serve|throughput|latency`: names, flags and metrics as `vllm bench` has them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from forebay.base.errors import ConfigError, EngineError
from forebay.base.http_client import Origin, get_json, post_json
from forebay.bench.load import Load, Run, Target, run_load
from forebay.bench.metrics import Rows, summarize
from forebay.bench.prompts import Prompt, Text, conversations, random_prompts
from forebay.cli import bench_options
from forebay.cli.arguments import Parser, number, whole
from forebay.cli.local import LocalModel, local_model
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason

Prompts = list[list[int]]


def run(words: Sequence[str]) -> int:
    """Run the benchmark that the first word names with the options behind it; return the exit status. Raises
    ConfigError."""
    kinds = {"serve": _serve, "throughput": _throughput, "latency": _latency}
    if not words or words[0] in ("-h", "--help"):
        print("usage: forebay bench serve|throughput|latency [options]\n\n"
              "serve measures a running server, throughput and latency an engine of their own.")  # fmt: skip
        return 0 if words else 2
    if words[0] not in kinds:
        raise ConfigError(f"there is no `forebay bench {words[0]}`: use serve, throughput or latency")
    return kinds[words[0]](words[1:])


def _serve(words: Sequence[str]) -> int:
    own = _serve_parser().parse(words).own
    route, limits = bench_options.route(own), bench_options.limits(own)
    url = f"http://{own.host or '127.0.0.1'}:{own.port or 30000}" if own.host or own.port else own.base_url
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        origin = Origin(url, own.api_key or os.environ.get("FOREBAY_API_KEY", ""))
        done, model = runner.run(_drive(own, origin, route))
    figures = {"limits_ms": limits, "percentiles": own.metric_percentiles}
    result = summarize(done.samples, done.seconds, done.cpu_seconds, **figures)
    settings = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": own.backend,
        "endpoint": route,
        "dataset_name": own.dataset_name,
        "model_id": model,
        "num_prompts": own.num_prompts,
        "request_rate": "inf" if own.request_rate == float("inf") else own.request_rate,
        "burstiness": own.burstiness,
        "max_concurrency": own.max_concurrency,
        "random_input_len": own.random_input_len,
        "random_input_max": own.random_input_max or own.random_input_len,
        "random_prefix_len": own.random_prefix_len,
        "random_output_len": own.random_output_len,
        "seed": own.seed,
    }
    _report("Serving Benchmark Result", result.rows(own.percentile_metrics))
    _save(own, settings | result.as_dict(), f"forebay-serve-{settings['date']}.json")
    for error in result.errors[:3]:
        print(f"failed request: {error}", file=sys.stderr)
    return 0 if result.completed else 1


def _serve_parser() -> Parser:
    parser = Parser("bench serve", "Send requests to a running server and measure what a client sees.", "[options]")
    parser.option("--base-url", "--url", metavar="URL", help="the server", default="http://127.0.0.1:30000")
    parser.option("--host", metavar="HOST", help="its host, instead of --base-url")
    parser.option("--port", type=whole(1, 65535), metavar="N", help="its port, instead of --base-url")
    parser.option("--api-key", metavar="KEY", help="where it asks for one", default_text="$FOREBAY_API_KEY")
    parser.option("--model", metavar="NAME", help="the model's name there", default_text="the first it names")
    parser.option(
        "--vocab-size", type=whole(2), metavar="N", help="token ids to draw from", default_text="what /server_info says"
    )
    _workload(parser, num_prompts=64)
    bench_options.add_options(parser)
    parser.option("--request-rate", type=number(0.001), default=float("inf"), metavar="X", help="arrivals a second")
    parser.option(
        "--max-concurrency", type=whole(1), metavar="N", help="most requests at once", default_text="no limit"
    )
    parser.option("--ignore-eos", action="store_true", help="always generate the whole output length")
    parser.option(
        "--num-warmups",
        "--warmup-requests",
        type=whole(0),
        default=1,
        metavar="N",
        help="requests before the measured ones",
    )
    parser.option("--disable-tqdm", action="store_true", help="no progress bar")
    _saving(parser)
    return parser


async def _drive(own: Any, origin: Origin, route: str) -> tuple[Run, str]:
    model = own.model or (await get_json(origin, "/v1/models"))["data"][0]["id"]
    prompts: Sequence[Prompt] = (
        _prompts(own, own.num_prompts + own.num_warmups, own.vocab_size or await _vocab_size(origin))
        if own.dataset_name == "random"
        else await _texts(own, origin, model)
    )
    target = Target(origin, model, own.random_output_len, own.ignore_eos, route)
    warm, measured = prompts[: own.num_warmups], prompts[own.num_warmups :]
    if warm:
        warmed = await run_load(target, Load(warm, float("inf"), 1, own.seed), lambda: None)
        if warmed.samples[0].error:
            raise EngineError(f"the first request failed: {warmed.samples[0].error}")
    load = Load(measured, own.request_rate, own.max_concurrency or len(measured), own.seed, own.burstiness)
    with _bar(len(measured), hidden=own.disable_tqdm) as bar:
        return await run_load(target, load, _advance(bar)), model


async def _texts(own: Any, origin: Origin, model: str) -> list[Text]:
    """Questions of the dataset, each with as many tokens to answer as the answer there has by the server's count."""
    turns = conversations(Path(own.dataset_path), own.num_prompts + own.num_warmups, own.seed)
    if own.sharegpt_output_len is not None:
        return [Text(turn.question, own.sharegpt_output_len) for turn in turns]
    texts = []
    for turn in turns:
        try:
            count = (await post_json(origin, "/tokenize", {"model": model, "prompt": turn.answer})).get("count")
        except EngineError as error:
            raise EngineError(f"{error.message}; give --sharegpt-output-len, and answers need not be counted") from None
        if not isinstance(count, int):
            raise EngineError(f"{origin}/tokenize counts no tokens: give --sharegpt-output-len")
        texts.append(Text(turn.question, max(1, count)))
    return texts


async def _vocab_size(origin: Origin) -> int:
    try:
        info = await get_json(origin, "/server_info")
    except EngineError as error:
        raise EngineError(f"{error.message}; give --vocab-size for a server that has no such route") from None
    engine = info.get("engine")
    if not isinstance(engine, dict) or not isinstance(engine.get("vocab_size"), int):
        raise EngineError("the server has not reported its vocabulary yet (/server_info): wait until it is ready")
    size: int = engine["vocab_size"]
    return size


def _throughput(words: Sequence[str]) -> int:
    parser = Parser("bench throughput", "All requests at once through an engine of our own.", "[MODEL] [options]")
    _workload(parser, num_prompts=64)
    _saving(parser)
    parser.engine_flags(server=False, model_is_positional=True)
    parsed = parser.parse(words)
    own = parsed.own
    config = parsed.resolve(max_queued_requests=own.num_prompts + 1, max_queued_tokens=1 << 30, log_level="warning",
                            queue_timeout=86400, request_timeout=86400)  # fmt: skip

    async def measure() -> tuple[float, int]:
        async with local_model(config) as model:
            prompts = _prompts(own, own.num_prompts, model.engine.info.vocab_size)
            await _complete(model, prompts[0], 8)
            num_inputs = sum(map(len, prompts))
            started = time.perf_counter()
            with _bar(own.num_prompts) as bar:
                advance = _advance(bar)

                async def one(prompt: list[int]) -> None:
                    await _complete(model, prompt, own.random_output_len)
                    advance()

                await asyncio.gather(*map(one, prompts))
            return time.perf_counter() - started, num_inputs

    seconds, inputs = asyncio.run(measure())
    outputs = own.num_prompts * own.random_output_len
    result = {
        "elapsed_time": seconds,
        "num_requests": own.num_prompts,
        "total_num_tokens": inputs + outputs,
        "requests_per_second": own.num_prompts / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
        "output_tokens_per_second": outputs / seconds,
    }
    _report("Throughput", [(name.replace("_", " "), value) for name, value in result.items()])
    _save(own, result, "forebay-throughput.json")
    return 0


def _latency(words: Sequence[str]) -> int:
    parser = Parser("bench latency", "One batch at a time through an engine of our own.", "[MODEL] [options]")
    parser.option("--batch-size", type=whole(1), default=8, metavar="N", help="requests in a batch")
    _lengths(parser, "", "random-", prompt=32)
    parser.option("--num-iters-warmup", type=whole(0), default=2, metavar="N", help="batches before the measured ones")
    parser.option("--num-iters", type=whole(1), default=10, metavar="N", help="measured batches")
    parser.option("--seed", type=whole(0), default=0, metavar="N", help="of the prompts")
    _saving(parser)
    parser.engine_flags(server=False, model_is_positional=True)
    parsed = parser.parse(words)
    own = parsed.own
    own.random_prefix_len, own.random_input_max = 0, None
    config = parsed.resolve(disable_radix_cache=True, log_level="warning")

    async def measure() -> list[float]:
        async with local_model(config) as model:
            seconds = []
            with _bar(own.num_iters_warmup + own.num_iters) as bar:
                for _ in range(own.num_iters_warmup + own.num_iters):
                    prompts = _prompts(own, own.batch_size, model.engine.info.vocab_size)
                    started = time.perf_counter()
                    await asyncio.gather(*(_complete(model, prompt, own.random_output_len) for prompt in prompts))
                    seconds.append(time.perf_counter() - started)
                    _advance(bar)()
            return seconds[own.num_iters_warmup :]

    latencies = asyncio.run(measure())
    result: dict[str, Any] = {"avg_latency": float(np.mean(latencies)), "latencies": latencies}
    result["percentiles"] = {str(p): float(np.percentile(latencies, p)) for p in (10, 25, 50, 75, 90, 99)}
    rows: Rows = [("Mean latency (ms):", 1e3 * result["avg_latency"])]
    rows += [(f"P{p} latency (ms):", 1e3 * value) for p, value in result["percentiles"].items()]
    _report("Latency", rows)
    _save(own, result, "forebay-latency.json")
    return 0


def _prompts(own: Any, count: int, vocab_size: int) -> Prompts:
    return random_prompts(
        count=count,
        length=own.random_input_len,
        max_length=own.random_input_max,
        prefix_length=own.random_prefix_len,
        vocab_size=vocab_size,
        seed=own.seed,
    )


async def _complete(model: LocalModel, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async with model.engine.submit(prompt_token_ids=prompt, params=params) as stream:
        async for update in stream:
            if update.finish is FinishReason.ERROR and update.failure is not None:
                raise EngineError(update.failure.message, code=update.failure.code)


def _workload(parser: Parser, *, num_prompts: int) -> None:
    parser.option("--num-prompts", "--num-prompt", type=whole(1), default=num_prompts, metavar="N", help="requests")
    _lengths(parser, "random-", "", prompt=128)
    parser.option(
        "--random-input-max", type=whole(1), metavar="N", help="longest prompt: lengths are drawn evenly up to it",
        default_text="all have --random-input-len",
    )  # fmt: skip
    parser.option("--random-prefix-len", type=whole(0), default=0, metavar="N", help="of the prompt, tokens all share")
    parser.option("--seed", type=whole(0), default=0, metavar="N", help="of prompts and arrivals")


def _lengths(parser: Parser, *prefixes: str, prompt: int) -> None:
    """vLLM names the lengths with `random-` in one command and without in the next: each takes both."""
    lengths = ("input", prompt, "tokens of each prompt"), ("output", 128, "tokens to generate for each")
    for word, default, help in lengths:
        names = [f"--{prefix}{word}-len" for prefix in prefixes]
        parser.option(*names, dest=f"random_{word}_len", type=whole(1), default=default, metavar="N", help=help)


def _saving(parser: Parser) -> None:
    parser.option("--save-result", action="store_true", help="write the figures as JSON")
    parser.option("--result-dir", metavar="DIR", default=".", help="where to")
    parser.option("--result-filename", metavar="FILE", help="under what name", default_text="made from the date")


def _save(own: Any, result: dict[str, Any], name: str) -> None:
    if not own.save_result and own.result_filename is None:
        return
    path = Path(own.result_dir) / (own.result_filename or name)
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--result-dir: {path} cannot be written ({error.strerror})") from None
    print(f"saved {path}")


def _report(title: str, rows: Rows) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(min_width=36)
    table.add_column(justify="right")
    for name, value in rows:
        if value is None:
            table.add_section()
            table.add_row(f"[bold]{name}[/bold]", "")
        else:
            table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    Console(highlight=False).print(table)


def _bar(total: int, *, hidden: bool = False) -> AbstractContextManager[Progress | None]:
    if hidden or not sys.stderr.isatty():
        return nullcontext(None)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
    bar.add_task("requests", total=total)
    return bar


def _advance(bar: Progress | None) -> Any:
    return (lambda: None) if bar is None else (lambda: bar.advance(bar.task_ids[0]))
