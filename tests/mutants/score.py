"""How many of the suite's mutants of the engine `forebay verify` finds, on a small random hybrid.

    nice python -m tests.mutants score --seed 1 --count 12

A mutant counts as found if a circumstance differs or fails, or no answer can be had alone. Not every mutant changes
tokens: read those that are missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from forebay.cli.main import main as forebay
from forebay.verify.run import Verification
from forebay.verify.verdict import Verdict
from tests.mutants.mutant import Mutant, Overlay, Stale, tried

AREAS: Final = ("memory/", "scheduler/", "runtime/")
# Contracts about tokens: those of the others are about limits, turns, errors and counts.
OF_TOKENS: Final = frozenset({"C6", "C13", "C14", "C15", "C16", "C18", "C19", "C26", "C28"})
_HANGS_S: Final = 900
_ROUNDS: Final = 2  # of asking everything in one circumstance
_MISSED: Final = "missed"


def drawn(mutants: Sequence[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of the engine whose contracts are about tokens, the same for the same seed."""
    of_engine = [one for one in mutants if one.file.startswith(AREAS) and OF_TOKENS.intersection(one.contracts)]
    return random.Random(seed).sample(of_engine, min(count, len(of_engine)))


def outcome(model: str, overlay: Overlay, mutant: Mutant) -> str:
    """Return where the mutant is found, `missed`, or why it could not be tried."""
    try:
        with overlay.changed(mutant.file, mutant.text):
            done = overlay.python(["-m", "tests.mutants.score", model], {"PYTHONPATH": str(overlay.root)}, _HANGS_S)
    except Stale as stale:
        return f"STALE {stale}"
    except subprocess.TimeoutExpired:
        return "hangs"
    where = done.stdout.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return where if done.returncode else _MISSED


async def first_found(model: str) -> str:
    """Return the first circumstance that differs or fails with this package, "" for none."""
    verification = Verification({"model_path": model}, num=8, max_tokens=24, seed=0)
    await verification.ask_alone()
    for circumstance in verification.circumstances:
        found = await verification.first_difference(circumstance, _ROUNDS)
        if found.verdict in (Verdict.DIFFERENT, Verdict.FAILED):
            return f"{found.name}: {found.verdict}"
    return ""


def main(arguments: Sequence[str], mutants: Sequence[Mutant]) -> int:
    """Print the outcome of each mutant that is drawn, and their number."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants score", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--like", default="falcon_h1", help="the family of the model")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / options.like)
        forebay(["models", "make", "--like", options.like, "--out", model, "--hidden-size", "64"])
        chosen = drawn(mutants, options.seed, options.count)
        for mutant, result in tried(chosen, partial(outcome, model), options.jobs):
            results.append(result)
            print(f"{result:<44} {mutant.file}: {mutant.rule}", flush=True)
    num_tried = sum(not result.startswith("STALE") for result in results)
    print(f"found by forebay verify: {num_tried - results.count(_MISSED)} of {num_tried}")
    return 0


if __name__ == "__main__":
    where = asyncio.run(first_found(sys.argv[1]))
    print(where)
    sys.exit(int(bool(where)))
