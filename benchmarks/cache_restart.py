"""Time to the first token of a prompt after a restart, with and without the files of the prefix cache.

    python -m benchmarks.cache_restart --model MODEL --tokens 2000 8000
    python -m benchmarks.cache_restart --made falcon_h1              # a hybrid with random weights
    python -m benchmarks.cache_restart --made llama_8b --tokens 2000 8000 30000 --repeats 1

Each case starts an engine anew and generates one token; with files an engine before it has computed the prompt. The
time to save is that from its first token to its end, by which all of it is on the disk. Of the times without files the
first is of that engine, which writes while it computes; with --repeats 1 there is no other.

Models with random weights are made in bfloat16: `falcon_h1` and `qwen3_next` of about 100 million weights, `llama_135m`
with the shape of the default model and 32,768 positions, and `llama_8b` with 2 of the 32 layers of Llama 3.1 8B and
8,192 tokens: computing and copying both take a time in proportion to the layers.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.hybrid_decode import MODELS, VOCAB, write_checkpoint
from forebay.base.units import human_bytes
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore, close
from forebay.formats import prefix_files
from forebay.requests.sampling_params import SamplingParams

_LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
MADE: Final[dict[str, dict[str, Any]]] = {
    **{kind: {"model_type": kind, **config} for kind, config in MODELS.items()},
    "llama_135m": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "llama_8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def cached_tokens(core: EngineCore, request_id: int, prompt: list[int]) -> int:
    """Generate one token; return how many tokens of the prompt were cached."""
    assert not core.add(AddRequest(request_id=request_id, prompt_token_ids=prompt, params=PARAMS))
    found = 0
    while request_id in core.scheduler.requests:
        found = max([found, *(update.cache.cached_tokens for update in core.step() if update.cache)])
    return found


def first_token_s(model: str | None, prompt: list[int], folder: Path | None) -> tuple[float, int, float]:
    """Return the seconds until the first token of a fresh engine, the number of cached tokens, and the seconds until
    the engine has ended."""
    settings = {"model": model} if model else {}
    settings |= {"prefix_cache_dir": str(folder)} if folder else {}
    asked = {"context_length": len(prompt) + 64, "max_running_requests": 2, "log_level": "warning", **settings}
    config = resolve(asked).engine
    times = dict.fromkeys(("queue_timeout_s", "request_timeout_s", "stall_timeout_s"), math.inf)
    core, _ = build_engine(replace(config, scheduling=replace(config.scheduling, **times)))
    cached_tokens(core, 1, [1, 2, 3])
    begin = time.perf_counter()
    found = cached_tokens(core, 2, prompt)
    first = time.perf_counter()
    while not core.idle:
        core.step()
    close(core)
    return first - begin, found, time.perf_counter() - first


def measure(name: str, model: str | None, num_tokens: int, repeats: int) -> None:
    """Print a row of a table for a number of tokens."""
    draw = random.Random(num_tokens)
    prompt = [draw.randrange(100, VOCAB) for _ in range(num_tokens)]
    cold, warm, cached = [], [], 0
    folder = Path(tempfile.mkdtemp(prefix="forebay-cache-"))
    try:
        seconds, _, save_s = first_token_s(model, prompt, folder)
        cold.append(seconds)
        size = sum(path.stat().st_size for path in prefix_files.paths(folder))
        for number in range(repeats):
            if number:
                cold.append(first_token_s(model, prompt, None)[0])
            seconds, cached, _ = first_token_s(model, prompt, folder)
            warm.append(seconds)
    finally:
        shutil.rmtree(folder)
    print(
        f"| {name} | {num_tokens:,} | {min(cold):.2f} | {min(warm):.2f} | {cached:,} | {human_bytes(size)} |"
        f" {save_s:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--made", choices=[*MADE], help="instead of --model")
    parser.add_argument("--layers", type=int, help="with --made: as many, instead of the model's own number")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-made-") as made:
        if args.made:
            layers = {"num_hidden_layers": args.layers} if args.layers else {}
            write_checkpoint(MADE[args.made] | layers, Path(made))
        name = f"{args.made} (--layers {args.layers})" if args.layers else args.made or args.model or "default"
        print(
            "| model | prompt | without files | with files | cached | size | saved in |\n|---|---|---|---|---|---|---|"
        )
        for num_tokens in args.tokens:
            measure(name, made if args.made else args.model, num_tokens, args.repeats)


if __name__ == "__main__":
    main()
