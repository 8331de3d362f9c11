"""How fast texts become vectors, beside other engines on the same cores.

    python -m benchmarks.encoders MODEL            # a folder of a text encoder, such as all-MiniLM-L6-v2
    python -m benchmarks.encoders MODEL --peers transformers,onnx --batches 1,16 --lengths 16,128

Texts are random words of so many tokens. The engines compute each batch in turns, so that what else runs on the machine
slows all of them alike. Figures are medians of the wall time and of the CPU time of all threads (llama-server's among
them), and medians over the turns of the quickest peer's time divided by ours.

Peers: `transformers` pads batches of 32 texts, longest first, as sentence-transformers does. `sentence-transformers`,
`onnx` (the folder's `onnx/model.onnx`, by ONNX Runtime) and `llama` (`--gguf FILE`, by llama-server over HTTP) are
left out if their packages or files are not there. `forebay-bfloat16` computes in bfloat16 beside those in float32.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch

from benchmarks.peers.places import llama_folder, llama_kernels
from forebay import LLM

PEERS: Final = ("forebay", "forebay-bfloat16", "transformers", "sentence-transformers", "onnx", "llama")
PADDED_BATCH: Final = 32  # sentence-transformers' default
WORDS: Final = (
    *("the", "pool", "above", "a", "turbine", "holds", "water", "for", "one", "day"),
    *("and", "feeds", "it", "through", "the", "gate", "at", "night"),
)

SERVERS: Final[list[int]] = []  # processes that compute for this one
LONGEST: Final = 512  # tokens of the lengths that are measured by default
OURS: Final = ("forebay", "forebay-bfloat16")

LLAMA: Final = llama_folder() / "llama-server"

Embed = Callable[[Sequence[str]], Any]


def texts_of(count: int, length: int, tokenizer: Any, seed: int) -> list[str]:
    """Return `count` texts of `length` tokens each, the tokens around them included."""
    rng = random.Random(seed)
    made: list[str] = []
    while len(made) < count:
        words = [rng.choice(WORDS) for _ in range(length)]
        while len(tokenizer.encode(" ".join(words))) > length:
            words.pop()
        made.append(" ".join(words))
    return made


def forebay_engine(path: Path, options: argparse.Namespace, dtype: str = "") -> Embed:
    """Return Forebay's `LLM.embed`, in the dtype of the command line or in another one."""
    llm = LLM(str(path), num_threads=options.threads, dtype=dtype or options.dtype, log_level="warning")
    return lambda texts: [output.embedding for output in llm.embed(texts)]


def transformers_engine(path: Path, options: argparse.Namespace) -> Embed:
    """Return the mean of transformers' hidden states, over padded batches."""
    from transformers import AutoModel, AutoTokenizer

    dtype = getattr(torch, options.dtype)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path, dtype=dtype).eval()

    def embed(texts: Sequence[str]) -> Any:
        vectors: dict[int, Any] = {}
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for first in range(0, len(order), PADDED_BATCH):
            chosen = order[first : first + PADDED_BATCH]
            encoded = tokenizer([texts[i] for i in chosen], padding=True, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**encoded).last_hidden_state.float()
            mask = encoded["attention_mask"].unsqueeze(-1)
            means = (hidden * mask).sum(1) / mask.sum(1)
            vectors |= zip(chosen, torch.nn.functional.normalize(means, dim=1).numpy(), strict=True)
        return [vectors[i] for i in range(len(texts))]

    return embed


def sentence_engine(path: Path, options: argparse.Namespace) -> Embed:
    """Return sentence-transformers' `encode`."""
    kind = import_module("sentence_transformers").SentenceTransformer
    model = kind(str(path), device="cpu", model_kwargs={"dtype": getattr(torch, options.dtype)})
    model.max_seq_length = LONGEST  # the folder may cut texts shorter
    return lambda texts: model.encode(list(texts), normalize_embeddings=True)


def onnx_engine(path: Path, options: argparse.Namespace) -> Embed:
    """Return the mean of the hidden states of `onnx/model.onnx`, over padded batches."""
    from transformers import AutoTokenizer

    onnxruntime: Any = import_module("onnxruntime")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    session = onnxruntime.InferenceSession(str(path / "onnx" / "model.onnx"), settings)
    tokenizer, names = AutoTokenizer.from_pretrained(path), {each.name for each in session.get_inputs()}

    def embed(texts: Sequence[str]) -> Any:
        vectors = []
        for first in range(0, len(texts), PADDED_BATCH):
            encoded = tokenizer(list(texts[first : first + PADDED_BATCH]), padding=True, return_tensors="np")
            hidden = session.run(None, {name: encoded[name] for name in names})[0]
            mask = encoded["attention_mask"][..., None]
            means = (hidden * mask).sum(1) / mask.sum(1)
            vectors += list(means / np.linalg.norm(means, axis=1, keepdims=True))
        return vectors

    return embed


def llama_engine(path: Path, options: argparse.Namespace) -> Embed:
    """Return what llama.cpp's server answers, one request for all texts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = str(options.threads)
    words = ["--embedding", "--model", str(options.gguf), "--port", str(port), "--threads", threads]
    words += ["--threads-batch", threads, "--parallel", "8", "--ctx-size", "4096", "--ubatch-size", "4096"]
    kernels = {**os.environ, "LD_LIBRARY_PATH": str(llama_kernels(None))}
    server = subprocess.Popen([str(LLAMA), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=kernels)
    atexit.register(server.kill)
    SERVERS.append(server.pid)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None, trust_env=False)
    while server.poll() is None:
        try:
            if client.get("/health").is_success:
                break
        except httpx.TransportError:
            time.sleep(0.1)
    return lambda texts: client.post("/v1/embeddings", json={"input": list(texts)}).raise_for_status().json()


def engines(path: Path, options: argparse.Namespace) -> dict[str, Embed]:
    """Make the engines that are there, by name."""
    makers = {
        "forebay": (forebay_engine, True),
        "forebay-bfloat16": (partial(forebay_engine, dtype="bfloat16"), True),
        "transformers": (transformers_engine, find_spec("transformers") is not None),
        "sentence-transformers": (sentence_engine, find_spec("sentence_transformers") is not None),
        "onnx": (onnx_engine, find_spec("onnxruntime") is not None and (path / "onnx" / "model.onnx").exists()),
        "llama": (llama_engine, LLAMA.exists() and options.gguf is not None),
    }
    found = {}
    for name in options.peers.split(","):
        make, there = makers[name]
        if there:
            found[name] = make(path, options)
        else:
            print(f"{name}: left out, its package or file is not there")
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the servers."""
    ticks = 0
    for pid in SERVERS:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measured(embed: Embed, texts: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of wall time and of CPU time."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    embed(texts)
    return time.perf_counter() - wall, cpu_seconds() - cpu


def ratios(times: dict[str, list[tuple[float, float]]]) -> str:
    """Return the medians, over the turns, of the quickest peer's wall and CPU time over each of ours."""
    peers = [each for name, each in times.items() if name not in OURS]
    shown = []
    for name in set(OURS) & set(times) if peers else ():
        turns = list(zip(*peers, strict=True))
        wall, cpu = (
            statistics.median(
                min(peer[kind] for peer in turn) / own[kind] for turn, own in zip(turns, times[name], strict=True)
            )
            for kind in (0, 1)
        )
        shown.append(f"{name} {wall:.2f}x (CPU {cpu:.2f}x)")
    return ", ".join(sorted(shown))


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--batches", default="1,16,256")
    parser.add_argument("--lengths", default="16,128,512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--gguf", type=Path, default=None)
    options = parser.parse_args()
    made = engines(options.model, options)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for length in map(int, options.lengths.split(",")):
        for count in map(int, options.batches.split(",")):
            texts = texts_of(count, length, tokenizer, seed=count)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
            for turn in range(options.rounds + 1):  # the first is for warming up
                for name, embed in made.items():
                    torch.set_num_threads(1 if name == "forebay" else options.threads)
                    taken = measured(embed, texts)
                    times[name] += [taken] if turn else []
            shown = ", ".join(
                f"{name} {statistics.median(wall for wall, _ in each) * 1e3:.1f} ms "
                f"(CPU {statistics.median(cpu for _, cpu in each) * 1e3:.1f} ms)"
                for name, each in times.items()
            )
            print(f"{count} texts of {length} tokens: {shown}; {ratios(times)}", flush=True)


if __name__ == "__main__":
    main()
