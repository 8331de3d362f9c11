"""Start a server, measure it at several concurrencies with `forebay bench serve`, print one table.

    python scripts/bench.py [--concurrency 1 4 16 64] [--transformers]

128 tokens in, 128 out, greedy, random prompts. `--transformers` measures transformers' `generate` (bfloat16, batches of
the same size) on the same machine right after each point.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
FOREBAY = str(BIN / "forebay")
INPUT_LEN = OUTPUT_LEN = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--transformers", action="store_true", help="also transformers' generate")
    own = parser.parse_args()
    rows = []
    for concurrency in own.concurrency:
        row = {"concurrency": concurrency, **measure(concurrency)}
        if own.transformers:
            row["transformers"] = transformers_rate(concurrency)
        rows.append(row)
        print(json.dumps(row), flush=True)
    print_table(rows)
    return 0


def measure(concurrency: int) -> dict[str, float]:
    """Output tok/s and latencies (ms) at one concurrency, of a server that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        server = subprocess.Popen(
            [FOREBAY, "serve", "--port", "0", "--max-queued-requests", "1024"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            command = [FOREBAY, "bench", "serve", "--base-url", url_of(server), "--ignore-eos", "--seed", "1"]
            command += ["--num-prompts", str(max(8, 3 * concurrency)), "--max-concurrency", str(concurrency)]
            command += ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
            command += ["--num-warmups", "2", "--result-filename", result.name, "--result-dir", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        finally:
            server.terminate()
            server.wait(30)
        figures = json.loads(result.read_text())
    return {name: figures[name] for name in ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms")}


def url_of(server: subprocess.Popen[str]) -> str:
    lines = server.stdout
    for line in lines or ():
        found = re.search(r"ready at (\S+)", line)
        if found:
            return found[1]
    raise SystemExit(f"the server did not start (exit code {server.wait()})")


def transformers_rate(batch: int) -> float:
    """Output tok/s of transformers' `generate` on one batch, prompts of equal length."""
    import torch
    from transformers import AutoModelForCausalLM

    from forebay.formats.store import find_model

    path = find_model(None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    ids = torch.randint(256, 49152, (batch, INPUT_LEN), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": OUTPUT_LEN, "max_new_tokens": OUTPUT_LEN}
    model.generate(ids[:1], **{**options, "min_new_tokens": 2, "max_new_tokens": 2})
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return batch * OUTPUT_LEN / (time.perf_counter() - started)


def print_table(rows: list[dict[str, float]]) -> None:
    names = list(rows[0])
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|" + " ---: |" * len(names))
    for row in rows:
        print(
            "| " + " | ".join(f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.3g}" for name in names) + " |"
        )


if __name__ == "__main__":
    sys.exit(main())
