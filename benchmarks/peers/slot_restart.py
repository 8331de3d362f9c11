"""Time to the first token of a prompt with llama.cpp, computed and from a slot that was saved before a restart.

    python -m benchmarks.peers.install llamacpp
    python -m benchmarks.peers.slot_restart --tokens 2000 8000

Beside `python -m benchmarks.cache_restart`, with the same prompts and the default model as Q4_0. A server computes the
prompt and saves its slot to a file; a second server restores the slot, and answers the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.hybrid_decode import VOCAB
from benchmarks.peers import places
from benchmarks.servers import free_port
from forebay.base.units import human_bytes

START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 600.0


def post(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the answer, and the seconds that it took."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
        return json.load(response), time.perf_counter() - begin


@contextmanager
def server(model: Path, folder: str, num_tokens: int) -> Iterator[str]:
    """Run llama-server with one slot until the end of the block; its address."""
    port, threads = free_port(), str(len(os.sched_getaffinity(0)))
    command = [
        *(str(places.llama_folder() / "llama-server"), "--model", str(model), "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--parallel", "1", "--ctx-size", str(num_tokens + 256)),
        *("--flash-attn", "on", "--slot-save-path", folder),
    ]
    kernels = {**os.environ, "LD_LIBRARY_PATH": str(places.llama_kernels(None))}
    process = subprocess.Popen(command, env=kernels, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + START_LIMIT_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit("llama-server did not start") from None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def first_token_s(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds of one token behind the prompt, and how many tokens of the prompt were computed for it."""
    answer, seconds = post(f"{url}/completion", {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "id_slot": 0})
    return seconds, int(answer["timings"]["prompt_n"])


def measure(model: Path, num_tokens: int) -> None:
    """Print a line for a number of tokens."""
    draw = random.Random(num_tokens)
    prompt = [draw.randrange(100, VOCAB) for _ in range(num_tokens)]
    with tempfile.TemporaryDirectory(prefix="forebay-slots-") as folder:
        with server(model, folder, num_tokens) as url:
            cold_s, _ = first_token_s(url, prompt)
            saved, save_s = post(f"{url}/slots/0?action=save", {"filename": "slot"})
        with server(model, folder, num_tokens) as url:
            _, restore_s = post(f"{url}/slots/0?action=restore", {"filename": "slot"})
            warm_s, computed = first_token_s(url, prompt)
    size = human_bytes(saved["n_written"])
    print(
        f"{num_tokens} tokens: {cold_s:.2f} s computed, {restore_s + warm_s:.2f} s restored ({restore_s:.2f} s of it "
        f"to restore, {computed} tokens computed again, {size}, saved in {save_s:.2f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; the default model as Q4_0 without")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000])
    args = parser.parse_args()
    for num_tokens in args.tokens:
        measure(args.model or places.q4_0(), num_tokens)


if __name__ == "__main__":
    main()
