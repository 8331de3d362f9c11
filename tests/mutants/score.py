"""How many of the suite's mutants of the engine `forebay verify` finds, on small random hybrids.

    nice python -m tests.mutants score
    nice python -m tests.mutants score radix --seed 1 --count 12
    nice python -m tests.mutants score --into score.txt     # begun again, it goes on behind the last one
    nice python -m tests.mutants score --into score.txt --again --rounds 4     # those that were missed

Each mutant is tried in a copy of the package: an interpreter imports the engine once, and forks one for each
circumstance in which the changed statements are reached (`reached.py`), those first that find most. A mutant counts as
found if a circumstance differs or fails, or no answer can be had alone; without a mutant there must be nothing. If it
takes longer than its time, it is counted apart. `silent.py` names the mutants that change no token of these models,
with reasons: they are not tried, unless `--all` is given. Of a missed one of the scheduler or its memory, `tokens.py`
decides: it is silent only if it passes the simulators' seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from forebay.base import child
from forebay.cli.main import main as forebay
from forebay.verify.circumstances import Circumstance, Flags
from forebay.verify.run import Verification
from forebay.verify.verdict import Verdict
from tests.integration.forked import ENGINE, Stock, fork_engine, this_process
from tests.mutants import reached
from tests.mutants.mutant import REPOSITORY, Mutant, Overlay, Stale, tried
from tests.mutants.reached import ALONE, Reached, changed_statements, probed
from tests.mutants.silent import SILENT

AREAS: Final = ("memory/", "scheduler/", "runtime/")
# Contracts about tokens: those of the others are about limits, turns, errors and counts.
OF_TOKENS: Final = frozenset({"C6", "C13", "C14", "C15", "C16", "C18", "C19", "C26", "C28"})
# The family of the model by what a mutant is about; the first is that of all others.
MODELS: Final = {"": "falcon_h1", "window": "gpt_oss", "ring": "deepseek_v4", "resident": "glm_moe_dsa"}
# Behind "+" is the model that drafts for it on the device, so that steps with drafts are planned ahead.
DRAFTED: Final = "gpt_oss+llama"
# Without states hits may end inside of a node; where there are states and windows, they have to agree.
ELSEWHERE: Final = {
    "C18 hits are whole pages": "gpt_oss",
    "C16 nothing behind a request's end is adopted": "gpt_oss",
    "C18 states and windows agree on where a hit ends": "lfm3",
    "C18 a window is held as long as a request reads it": DRAFTED,
    "C28 a row is given out only behind the last step that computes for its request": DRAFTED,
}
HANGS: Final = "hangs"
MISSED: Final = "missed"
NOT_REACHED: Final = "missed, not reached"
STALE: Final = "STALE"
_SEPARATOR: Final = " | "
_LIMIT_S: Final = 600
_SILENCE_S: Final = 10.0  # of small models: an engine without a token for so long hangs
_FIRST: Final = ("all of it", "cache", "retracted", "adapters loaded", "speculative", "apart, tcp")  # words of names
_KEPT: Final = REPOSITORY / "build" / "mutants" / "score"


def drawn(mutants: Sequence[Mutant], seed: int | None, count: int | None) -> list[Mutant]:
    """Return the mutants of the engine whose contracts are about tokens. With a seed they are in a random order, the
    same for the same seed; with `count` only as many."""
    of_engine = [one for one in mutants if one.file.startswith(AREAS) and OF_TOKENS.intersection(one.contracts)]
    if seed is not None:
        random.Random(seed).shuffle(of_engine)
    return of_engine[:count]


def family_of(mutant: Mutant) -> str:
    """Return the family of the model that a mutant is tried on."""
    if mutant.rule in ELSEWHERE:
        return ELSEWHERE[mutant.rule]
    about = f"{mutant.file} {mutant.rule}"
    named = [family for word, family in MODELS.items() if re.search(rf"(?<![a-z]){word}s?(?![a-z])", about) and word]
    return named[-1] if named else MODELS[""]


def outcome(folder: Path, found: Reached, rounds: int, overlay: Overlay, mutant: Mutant) -> str:
    """Return where the mutant is found, `missed`, or why it could not be tried."""
    try:
        with overlay.changed(mutant.file, mutant.text):
            if where := found.by(mutant):
                return verified(overlay, _asked(folder, where, rounds))
            return NOT_REACHED
    except Stale as stale:
        return f"{STALE} {stale}"


def _asked(folder: Path, where: set[str], rounds: int) -> dict[str, Any]:
    """Return what the process with a mutant verifies."""
    return {"folder": str(folder), "where": sorted(where), "rounds": rounds, "probes": ""}


def verified(overlay: Overlay, asked: Mapping[str, Any]) -> str:
    """Return where the package of `overlay` is found to be faulty, or `missed`."""
    arguments = ["-m", "tests.mutants.score", json.dumps(asked)]
    try:
        done = overlay.python(arguments, {"PYTHONPATH": str(overlay.root)}, _LIMIT_S)
    except subprocess.TimeoutExpired:
        return HANGS
    where = done.stdout.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return where if done.returncode else MISSED


async def first_found(folder: str, where: Sequence[str], rounds: int, probes: str) -> str:
    """Return the first circumstance of `where` that differs or fails with this package, "" for none. With `probes`, a
    folder, write what each circumstance reaches instead, and the answers that are given alone."""
    model, kept = Path(folder), Path(folder) / "reached"
    given: Flags = {"model_path": str(model), "num_threads": 1, **_drafts_for(model)}
    verification = Verification(given, num=9, max_tokens=24, seed=0, silence_s=_SILENCE_S)
    in_order = sorted(verification.circumstances, key=_place)
    if probes:
        return await _recorded(verification, in_order, Path(probes), kept)
    if ALONE in where:
        await verification.ask_alone()
    else:
        verification.baseline = Reached.read(kept).baseline
    for circumstance in in_order:
        if circumstance.name in where:
            found = await verification.first_difference(circumstance, rounds)
            if found.verdict in (Verdict.DIFFERENT, Verdict.FAILED):
                return f"{found.name}: {found.verdict}"
    return ""


def _drafts_for(model: Path) -> Flags:
    """Return the settings of the drafts on the device for a model, if its family has some."""
    _, _, drafter = model.name.partition("+")
    path = str(model.parent / drafter)
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path} if drafter else {}


async def _recorded(verification: Verification, in_order: Sequence[Circumstance], probes: Path, kept: Path) -> str:
    """Write what is reached alone and in each circumstance. Return the first circumstance that differs or fails."""
    numbers = {int(number): (file, line) for number, file, line in json.loads((probes / "places").read_text())}
    lines = {}

    def moved(name: str) -> None:
        hits = [path for path in probes.iterdir() if path.name.isdigit()]
        lines[name] = frozenset(numbers[int(path.name)] for path in hits)
        for path in hits:
            path.unlink()

    os.environ[reached.FOLDER] = str(probes)
    await verification.ask_alone()
    for circumstance in in_order:
        await verification.ask_alone_for(circumstance)
    moved(ALONE)
    for circumstance in in_order:
        found = await verification.first_difference(circumstance, 1)
        if found.verdict in (Verdict.DIFFERENT, Verdict.FAILED):
            return f"{found.name}: {found.verdict}"
        moved(circumstance.name)
    Reached([one.name for one in in_order], verification.baseline, lines).write(kept)
    return ""


def _place(circumstance: Circumstance) -> int:
    return next((place for place, word in enumerate(_FIRST) if word in circumstance.name), len(_FIRST))


def summary_of(results: Sequence[str], num_silent: int) -> str:
    """Return how many were found of how many, and of those that are no part of the score."""
    counts = Counter(result if result == HANGS else result.split()[0].rstrip(",") for result in results)
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


def _try_on(
    family: str,
    mutants: Sequence[Mutant],
    everything: Sequence[Mutant],
    folder: Path,
    jobs: int,
    rounds: int,
    results: Results,
) -> None:
    """Find the outcome of each mutant on a model of this family, unless something is found without one."""
    main_model, _, drafter = family.partition("+")
    for like, path in ((main_model, folder), (drafter, folder.parent / drafter)):
        if like and not path.exists():
            forebay(["models", "make", "--like", like, "--out", str(path), "--hidden-size", "64"])
    if clean := reached_of(family, everything, folder):
        print(f"{family} without a mutant: {clean}; {len(mutants)} mutants are not tried", flush=True)
        return
    found = Reached.read(folder / "reached")

    for mutant, result in tried(mutants, partial(outcome, folder, found, rounds), jobs):
        results.add(mutant.rule, result)


def reached_of(family: str, mutants: Sequence[Mutant], folder: Path) -> str:
    """Write what verification of `folder` reaches of the statements that `mutants` change, unless that is known of this
    source. Return what is found without a mutant, "" for nothing."""
    sources = {one.file: (REPOSITORY / "forebay" / one.file).read_text() for one in mutants}
    places = sorted(
        {(one.file, line) for one in mutants for line in changed_statements(sources[one.file], one) if line is not None}
    )
    kept = _KEPT / f"{family}-{_digest(json.dumps(places))}"
    if not kept.exists():
        ((_, clean),) = tried([places], partial(_probe, folder, sources), 1)
        if clean != MISSED:
            return clean
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "reached", kept)
    shutil.copy(kept, folder / "reached")
    return ""


def _probe(folder: Path, sources: Mapping[str, str], overlay: Overlay, places: Sequence[tuple[str, int]]) -> str:
    """Verify a copy with a probe at each place; return what is found."""
    probes = overlay.root / "probes"
    probes.mkdir()
    (probes / "places").write_text(json.dumps([(number, *place) for number, place in enumerate(places)]))
    for file, source in sources.items():
        numbers = {line: number for number, (name, line) in enumerate(places) if name == file}
        (overlay.root / "forebay" / file).write_text(probed(source, numbers))
    return verified(overlay, {**_asked(folder, set(), 2), "probes": str(probes)})


def _digest(text: str) -> str:
    files = sorted([*(REPOSITORY / "forebay").rglob("*.py"), Path(__file__)])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files) + text.encode()).hexdigest()[:16]


def main(arguments: Sequence[str], mutants: Sequence[Mutant]) -> int:
    """Print the outcome of each mutant that is drawn, and their number."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants score", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rules with it in their file or their words")
    parser.add_argument("--seed", type=int, help="of a random order")
    parser.add_argument("--count", type=int, help="how many are drawn")
    parser.add_argument("--all", action="store_true", help="those that change no token, too")
    parser.add_argument("--into", default="", metavar="FILE", help="keep outcomes here, and try only what it lacks")
    parser.add_argument("--again", action="store_true", help="those that were missed in --into, too")
    parser.add_argument("--most", type=int, metavar="N", help="try only so many now")
    parser.add_argument("--rounds", type=int, default=2, help="of asking everything in one circumstance")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    wanted = [one for one in mutants if not options.words or any(w in f"{one.file} {one.rule}" for w in options.words)]
    found = drawn(wanted, options.seed, options.count)
    chosen = [one for one in found if options.all or one.rule not in SILENT]
    results = Results(options.into)
    done = {rule for rule, result in results.of.items() if not (options.again and result.startswith((MISSED, HANGS)))}
    left = [one for one in chosen if one.rule not in done][: options.most]
    everything = drawn(mutants, None, None)
    with tempfile.TemporaryDirectory() as folder:
        for family, _ in Counter(map(family_of, left)).most_common():
            of_family = [one for one in left if family_of(one) == family]
            _try_on(family, of_family, everything, Path(folder) / family, options.jobs, options.rounds, results)
    outcomes = [results.of[one.rule] for one in chosen if one.rule in results.of]
    print(summary_of(outcomes, len(found) - len(chosen)))
    return 0


if __name__ == "__main__":
    __import__(ENGINE, fromlist=["main"])
    stock = Stock(this_process)
    child.start = partial(fork_engine, stock)
    try:
        where = asyncio.run(first_found(**json.loads(sys.argv[1])))
    finally:
        stock.close()
    print(where)
    sys.exit(int(bool(where)))
