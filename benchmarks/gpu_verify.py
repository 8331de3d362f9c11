"""Verify a GPU's kernels in Triton's interpreter, model by model: whether anything around a request changes its bits.

    python -m benchmarks.gpu_verify                     # every model, an hour on one core
    python -m benchmarks.gpu_verify llama falcon_h1     # two of them
    python -m benchmarks.gpu_verify llama --only chunks cache

The questions, engine processes and circumstances are those of `forebay verify`, on random models of one to three layers
in float32. A circumstance is `same` if no token and no log-probability of an answer differs in any bit from that of the
same request alone. Each has a limit of --limit seconds, after which it is `cut off`. No GPU is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from forebay.config.flag import Value
from forebay.engine.lifecycle.launch import launch
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.requests.step_plan import Launched, StepPlan
from forebay.text.tokenizer_saving import save_tokenizer
from forebay.verify import asking
from forebay.verify.circumstances import Circumstance
from forebay.verify.run import Outcome, Verification
from forebay.verify.verdict import Verdict
from tests.text.tiny_tokenizer import tiny_metadata

PROGRAM: Final = "benchmarks.gpu_verify"
ENGINE: Final = "--engine"  # the first argument of an engine process
VOCAB_SIZE: Final = 272
HIDDEN_SIZE: Final = 64
NUM_PROMPTS, NUM_TOKENS = 3, 10  # by default, and of each answer
LONG_PAGE: Final = 256  # tokens: prompts have two to three pages, so more than one segment of 512 keys
PROGRAMS: Final = 8  # that a decode's attention is divided among: the interpreter runs one at a time
# Those in which other requests, the cut of a prompt, the page size, kept memory or drafts change what a step computes.
NAMES: Final = (
    "one by one again, backwards",
    "all at once, from graphs",
    "coming and going",
    "prompts in chunks",
    "steps planned ahead",
    "pages of one token",
    "from the prefix cache",
    "retracted",
    "speculative decoding",
)
NAMES_WITH_ADAPTERS: Final = ("adapters beside the model", "adapters loaded anew", "adapters, retracted")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small model `like` a type, with the `fields` of its config.json that differ, and the engine's settings."""

    like: str
    num_layers: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    names: tuple[str, ...] = NAMES


CASES: Final = {
    "llama": Case(like="llama"),
    "qwen3": Case(like="qwen3"),
    "gpt_oss": Case(like="gpt_oss", num_layers=2, fields={"sliding_window": 24}),
    "falcon_h1": Case(like="falcon_h1"),
    "qwen3_next": Case(like="qwen3_next", num_layers=2, fields={"layer_types": ["linear_attention", "full_attention"]}),
    "deepseek_v3": Case(like="deepseek_v3", num_layers=2),
    "deepseek_v4": Case(
        like="deepseek_v4",
        num_layers=3,
        fields={
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "sliding_window": 24,
            "index_topk": 8,
        },
    ),
    "gemma4": Case(like="gemma4_text", num_layers=2, fields={"sliding_window": 24}),
    "llama in int4": Case(like="llama", settings={"quantization": "int4"}),
    "llama with adapters": Case(like="llama", names=NAMES_WITH_ADAPTERS),
    "llama, two segments of keys": Case(like="llama", settings={"page_size": LONG_PAGE}),
}


def make_model(case: Case, folder: Path) -> None:
    """Write the random model of a case, with a byte-level tokenizer: most of a larger vocabulary is sampling."""
    from forebay.models.random_weights import write_random_weights

    fields = small_config(case.like, hidden_size=HIDDEN_SIZE, num_layers=case.num_layers, vocab_size=VOCAB_SIZE)
    fields = {**fields, "dtype": "float32", "bos_token_id": 1, "eos_token_id": [2], **case.fields}
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    save_tokenizer(tiny_metadata(VOCAB_SIZE), folder)
    config = config_from_folder(folder)
    write_random_weights(
        config, folder / "model.safetensors", dtype="float32", seed=0, progress=lambda done, total: None
    )


def verdict_of(outcome: Outcome) -> str:
    """Return the verdict on a circumstance; tokens that are equal with other log-probabilities are a difference."""
    gap = outcome.findings.largest_logprob_gap
    if outcome.verdict is Verdict.SAME and gap:
        return f"different: log-probabilities by {gap:.2g}"
    return str(outcome.verdict)


async def tried(verification: Verification, circumstance: Circumstance, limit_s: float) -> str:
    """Return the row of the table of a circumstance: its verdict, seconds, and how far it came about."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            outcome = await verification.outcome(circumstance)
    except TimeoutError:
        return f"cut off | {limit_s:.0f} | "
    return f"{verdict_of(outcome)} | {time.monotonic() - began:.0f} | {outcome.what}"


async def verify(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Print a row for each circumstance of a case. Returns whether each one is the same."""
    case, words = CASES[name], options.only
    given = {"model_path": str(folder), "kernels": "triton-interpreter", "dtype": "float32", "num_threads": 1}
    verification = Verification({**given, **case.settings}, num=options.prompts, max_tokens=NUM_TOKENS, seed=0)
    lengths = [len(question.prompt) for question in verification.questions]
    began = time.monotonic()
    await verification.ask_alone()
    about = f"prompts of {', '.join(map(str, lengths))} tokens, {NUM_TOKENS} more behind each"
    print(f"| {name} | alone | asked | {time.monotonic() - began:.0f} | {about} |", flush=True)
    by_name = {one.name: one for one in verification.circumstances}
    rows = []
    for chosen in case.names:
        if not words or any(word in chosen for word in words):
            rows.append(await tried(verification, by_name[chosen], options.limit))
            print(f"| {name} | {chosen} | {rows[-1]} |", flush=True)
    return all(row.startswith("same |") for row in rows)


def run_engine() -> int:
    """Run an engine process whose interpreter keeps what it would find again, and whose graphs are those of a GPU: of
    as many tokens, padded, and each replay held to what was captured. Torch's functions of an element have the same
    bits wherever it lies, as a GPU's have."""
    from forebay.engine.loop import build
    from forebay.engine.loop.process import main as run
    from forebay.ops.triton import attention
    from forebay.runtime.model_runner import ModelRunner
    from tests.ops.interpreter import speed_up
    from tests.runtime.elementwise import SameEverywhere
    from tests.runtime.fake_cuda import FakeCudaGraphs

    class Graphs(FakeCudaGraphs):
        captures_quickly = True  # where a step first needs one: few are needed
        _WARM_UPS = 0

    launch_step = ModelRunner.launch

    def launched(runner: ModelRunner, plan: StepPlan) -> Launched:
        with SameEverywhere():  # type: ignore[no-untyped-call]
            return launch_step(runner, plan)

    speed_up()
    attention._PROGRAMS = PROGRAMS
    del sys.argv[1]  # ENGINE
    with (
        mock.patch.object(build, "graphs_for", return_value=Graphs()),
        mock.patch.object(ModelRunner, "launch", launched),
    ):
        return run()


def main(arguments: list[str]) -> int:
    if arguments[:1] == [ENGINE]:
        return run_engine()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="MODEL", help="; ".join(CASES))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="circumstances with one in their names")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, metavar="N", help="how many are asked")
    parser.add_argument("--limit", type=float, default=280.0, metavar="S", help="seconds of a circumstance")
    args = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    print("| model | circumstance | verdict | seconds | |\n|---|---|---|---|---|", flush=True)
    same = []
    with mock.patch.object(asking, "launch", functools.partial(launch, entry=("-m", PROGRAM, ENGINE))):
        for name in args.cases or CASES:
            with tempfile.TemporaryDirectory() as folder:
                make_model(CASES[name], Path(folder))
                same.append(asyncio.run(verify(name, Path(folder), args)))
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
