"""Output tokens per second of a Forebay server beside transformers' `generate`, in one run on one machine.

    make bench                                           # 128 prompt and 128 output tokens, concurrency 1, 4, 16, 64
    make bench ARGS="--max-concurrency 16 --repeats 5"

Forebay is measured from outside, by `forebay bench serve` over HTTP with streaming; transformers from inside, by one
batched `generate` call in bfloat16 with SDPA and all cores. Both serve the embedded model. The runs alternate,
and each figure is the median of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forebay.formats.store import find_model

_LEN = 128
_BIN = Path(sys.executable).parent


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server on a port of its own choice."""
    command = [str(_BIN / "forebay"), "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith("ready at ")), None)
            if ready is None:
                raise SystemExit(
                    f"the server ended with code {process.wait()} before it was ready; its message is above"
                )
            yield ready.split()[2]
        finally:
            process.terminate()


def forebay(url: str, concurrency: int, num_prompts: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(_BIN / "forebay", "bench", "serve", "--base-url", url),
            *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)),
            *("--random-input-len", str(_LEN), "--random-output-len", str(_LEN), "--ignore-eos"),
            *("--seed", str(time.monotonic_ns() % 2**31)),  # new prompts each time: nothing comes from the prefix cache
            *("--save-result", "--result-filename", str(result)),
        ]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(result.read_text())["output_throughput"])


def transformers_server() -> None:
    """A child that loads the model once and answers each batch size on standard input with tokens per second."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = str(find_model(None))
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    print("ready", flush=True)
    for line in sys.stdin:
        batch = int(line)
        prompts = torch.randint(10, 40_000, (batch, _LEN))
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=_LEN,
                min_new_tokens=_LEN,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == 2 * _LEN
        print(batch * _LEN / (time.perf_counter() - start), flush=True)


@contextmanager
def transformers() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, __file__, "--transformers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise SystemExit(
                f"transformers did not load the model: {sys.executable} {__file__} --transformers says why"
            )
        yield child
    finally:
        child.kill()
        child.wait()


def generate(child: subprocess.Popen[str], batch: int) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{batch}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: at least 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--max-concurrency",
        "--concurrency",
        type=positive,
        nargs="+",
        default=[1, 4, 16, 64],
        help="requests at once, one row of the table each",
    )
    parser.add_argument("--repeats", type=positive, default=3, help="alternating runs behind each median")
    parser.add_argument("--transformers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers:
        transformers_server()
        return
    table = Table(
        "concurrency",
        "forebay, tok/s",
        "transformers, tok/s",
        "ratio",
        title=f"output tokens per second, {_LEN} in, {_LEN} out, median of {args.repeats}",
    )
    with transformers() as child, server() as url:
        forebay(url, 4, 8)  # warm up
        generate(child, 1)
        for concurrency in args.max_concurrency:
            ours, theirs = [], []
            for run in range(1, args.repeats + 1):
                ours.append(forebay(url, concurrency, max(4, 2 * concurrency)))
                theirs.append(generate(child, concurrency))
                figures = f"{ours[-1]:.0f} and {theirs[-1]:.0f} tok/s"
                print(f"concurrency {concurrency}, run {run} of {args.repeats}: {figures}", file=sys.stderr)
            a, b = statistics.median(ours), statistics.median(theirs)
            table.add_row(str(concurrency), f"{a:.0f}", f"{b:.0f}", f"{a / b:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
