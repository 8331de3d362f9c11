from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mutants import MUTANTS, draw, score, tokens
from tests.mutants.contracts import write
from tests.mutants.mutant import Mutant, Overlay, Stale, tried


def chosen(words: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose file or rule has one of `words` in it; all of them without words."""
    return [mutant for mutant in MUTANTS if not words or any(w in f"{mutant.file} {mutant.rule}" for w in words)]


def outcome(overlay: Overlay, mutant: Mutant) -> str:
    try:
        return "found" if overlay.finds(mutant) else "SURVIVED"
    except Stale as stale:
        return f"STALE {stale}"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["draw"]:
        return draw.main(arguments[1:])
    if arguments[:1] == ["score"]:
        return score.main(arguments[1:], MUTANTS)
    if arguments[:1] == ["tokens"]:
        return tokens.main(arguments[1:], MUTANTS)
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Takes each rule out of a copy of the package; its test must then fail.",
        epilog="`draw --help`: changes drawn at random. `score --help`: what `forebay verify` finds. `tokens --help`: "
        "what changes a token in the simulators.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rules with it in their file or their words")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the package that are tried at a time")
    parser.add_argument("--write", action="store_true", help="write docs/contracts.md anew, and try nothing")
    options = parser.parse_args(arguments)
    if options.write:
        write()
        return 0
    mutants = chosen(options.words)
    if not mutants:
        parser.error(f"no rule has one of these words: {' '.join(options.words)}")
    num_found = 0
    for mutant, result in tried(mutants, outcome, options.jobs):
        num_found += result == "found"
        print(f"{result:<9} {mutant.file}: {mutant.rule} -> {mutant.test}", flush=True)
    print(f"mutation score: {num_found} of {len(mutants)}")
    return 0 if num_found == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
