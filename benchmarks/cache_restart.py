"""Time to the first token of a prompt after a restart, with and without the files of the prefix cache.

    python -m benchmarks.cache_restart --model MODEL --tokens 2000 8000

Each case starts an engine anew and generates one token; with files an engine before it has computed the prompt.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from forebay import LLM, SamplingParams
from forebay.base.units import human_bytes
from forebay.formats import prefix_files


def first_token_s(model: str | None, prompt: list[int], context: int, folder: Path | None) -> tuple[float, int]:
    """Return the seconds until the first token of a fresh engine, and the number of cached tokens."""
    where = {"prefix_cache_dir": str(folder)} if folder else {}
    with LLM(model, context_length=context, max_running_requests=2, **where) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, temperature=0.0))
        begin = time.perf_counter()
        (output,) = llm.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        )
        seconds = time.perf_counter() - begin
        return seconds, output.cache.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    for num_tokens in args.tokens:
        draw = random.Random(num_tokens)
        prompt = [draw.randrange(100, 30_000) for _ in range(num_tokens)]
        cold, warm, cached = [], [], 0
        folder = Path(tempfile.mkdtemp(prefix="forebay-cache-"))
        try:
            first_token_s(args.model, prompt, num_tokens + 64, folder)
            for _ in range(args.repeats):
                cold.append(first_token_s(args.model, prompt, num_tokens + 64, None)[0])
                seconds, cached = first_token_s(args.model, prompt, num_tokens + 64, folder)
                warm.append(seconds)
            size = sum(path.stat().st_size for path in prefix_files.paths(folder))
        finally:
            shutil.rmtree(folder)
        print(
            f"{num_tokens} tokens: {min(cold):.2f} s without files, {min(warm):.2f} s with files "
            f"({cached} tokens cached, {human_bytes(size)})"
        )


if __name__ == "__main__":
    main()
