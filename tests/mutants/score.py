"""How many of the suite's mutants of the engine `forebay verify` finds, on small random hybrids.

    nice python -m tests.mutants score
    nice python -m tests.mutants score radix --seed 1 --count 12
    nice python -m tests.mutants score --into score.txt     # begun again, it goes on behind the last one

Each mutant is tried in a copy of the package: an interpreter imports the engine once, and forks one for each
circumstance, those first that find most. A mutant counts as found if a circumstance differs or fails, or no answer can
be had alone; without a mutant there must be nothing. One that takes longer than its time is counted apart. `silent.py`
names the mutants that change no token of these models, with reasons: they are not tried, unless `--all` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from forebay.base import child
from forebay.cli.main import main as forebay
from forebay.verify.circumstances import Circumstance
from forebay.verify.run import Verification
from forebay.verify.verdict import Verdict
from tests.integration.forked import close_stock, start_engine
from tests.mutants.mutant import Mutant, Overlay, Stale, tried
from tests.mutants.silent import SILENT

AREAS: Final = ("memory/", "scheduler/", "runtime/")
# Contracts about tokens: those of the others are about limits, turns, errors and counts.
OF_TOKENS: Final = frozenset({"C6", "C13", "C14", "C15", "C16", "C18", "C19", "C26", "C28"})
# The family of the model by what a mutant is about; the first is that of all others.
MODELS: Final = {"": "falcon_h1", "window": "gpt_oss", "ring": "deepseek_v4", "resident": "glm_moe_dsa"}
HANGS: Final = "hangs"
MISSED: Final = "missed"
STALE: Final = "STALE"
_SEPARATOR: Final = " | "
_LIMIT_S: Final = 300
_ROUNDS: Final = 2  # of asking everything in one circumstance
_FIRST: Final = ("all of it", "cache", "retracted", "adapters loaded", "speculative", "apart, tcp")  # words of names


def drawn(mutants: Sequence[Mutant], seed: int | None, count: int | None) -> list[Mutant]:
    """Return the mutants of the engine whose contracts are about tokens. With a seed they are in a random order, the
    same for the same seed; with `count` only as many."""
    of_engine = [one for one in mutants if one.file.startswith(AREAS) and OF_TOKENS.intersection(one.contracts)]
    if seed is not None:
        random.Random(seed).shuffle(of_engine)
    return of_engine[:count]


def family_of(mutant: Mutant) -> str:
    """Return the family of the model that a mutant is tried on."""
    about = f"{mutant.file} {mutant.rule}"
    named = [family for word, family in MODELS.items() if re.search(rf"(?<![a-z]){word}s?(?![a-z])", about) and word]
    return named[-1] if named else MODELS[""]


def outcome(folder: Path, overlay: Overlay, mutant: Mutant) -> str:
    """Return where the mutant is found, `missed`, or why it could not be tried."""
    try:
        with overlay.changed(mutant.file, mutant.text):
            return verified(folder, overlay, family_of(mutant))
    except Stale as stale:
        return f"{STALE} {stale}"


def verified(folder: Path, overlay: Overlay, family: str) -> str:
    """Return where the package of `overlay` is found to be faulty, or `missed`."""
    arguments = ["-m", "tests.mutants.score", str(folder / family)]
    try:
        done = overlay.python(arguments, {"PYTHONPATH": str(overlay.root)}, _LIMIT_S)
    except subprocess.TimeoutExpired:
        return HANGS
    where = done.stdout.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return where if done.returncode else MISSED


async def first_found(model: str) -> str:
    """Return the first circumstance that differs or fails with this package, "" for none."""
    verification = Verification({"model_path": model}, num=8, max_tokens=24, seed=0)
    await verification.ask_alone()
    for circumstance in sorted(verification.circumstances, key=_place):
        found = await verification.first_difference(circumstance, _ROUNDS)
        if found.verdict in (Verdict.DIFFERENT, Verdict.FAILED):
            return f"{found.name}: {found.verdict}"
    return ""


def _place(circumstance: Circumstance) -> int:
    return next((place for place, word in enumerate(_FIRST) if word in circumstance.name), len(_FIRST))


def summary_of(results: Sequence[str], num_silent: int) -> str:
    """Return how many were found of how many, and of those that are no part of the score."""
    counts = Counter(result if result in (MISSED, HANGS) else result.split()[0] for result in results)
    num_tried = len(results) - counts[STALE]
    num_found = num_tried - counts[MISSED] - counts[HANGS]
    return (
        f"found by forebay verify: {num_found} of {num_tried}, {counts[HANGS]} more by their time; "
        f"{num_silent} change no token, {counts[STALE]} are stale"
    )


class Results:
    """The outcome of each mutant by its rule, in the file `path`, "" for none: a line each, kept between runs."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        lines = self._path.read_text().splitlines() if self._path and self._path.exists() else []
        self.of = {rule: outcome.strip() for outcome, _, rule in (line.partition(_SEPARATOR) for line in lines)}

    def add(self, rule: str, outcome: str) -> None:
        """Print and keep an outcome."""
        self.of[rule] = outcome
        line = f"{outcome:<44}{_SEPARATOR}{rule}"
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{line}\n")


def _try_on(family: str, mutants: Sequence[Mutant], folder: Path, jobs: int, results: Results) -> None:
    """Find the outcome of each mutant on a model of this family, unless something is found without one."""
    forebay(["models", "make", "--like", family, "--out", str(folder / family), "--hidden-size", "64"])
    ((_, clean),) = tried([family], partial(verified, folder), 1)
    if clean != MISSED:
        print(f"{family} without a mutant: {clean}; {len(mutants)} mutants are not tried", flush=True)
        return
    for mutant, result in tried(mutants, partial(outcome, folder), jobs):
        results.add(mutant.rule, result)


def main(arguments: Sequence[str], mutants: Sequence[Mutant]) -> int:
    """Print the outcome of each mutant that is drawn, and their number."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants score", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rules with it in their file or their words")
    parser.add_argument("--seed", type=int, help="of a random order")
    parser.add_argument("--count", type=int, help="how many are drawn")
    parser.add_argument("--all", action="store_true", help="those that change no token, too")
    parser.add_argument("--into", default="", metavar="FILE", help="keep outcomes here, and try only what it lacks")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    wanted = [one for one in mutants if not options.words or any(w in f"{one.file} {one.rule}" for w in options.words)]
    found = drawn(wanted, options.seed, options.count)
    chosen = [one for one in found if options.all or one.rule not in SILENT]
    results = Results(options.into)
    left = [one for one in chosen if one.rule not in results.of]
    with tempfile.TemporaryDirectory() as folder:
        for family, _ in Counter(map(family_of, left)).most_common():
            of_family = [one for one in left if family_of(one) == family]
            _try_on(family, of_family, Path(folder), options.jobs, results)
    outcomes = [results.of[one.rule] for one in chosen if one.rule in results.of]
    print(summary_of(outcomes, len(found) - len(chosen)))
    return 0


if __name__ == "__main__":
    child.start = start_engine
    try:
        where = asyncio.run(first_found(sys.argv[1]))
    finally:
        close_stock()
    print(where)
    sys.exit(int(bool(where)))
