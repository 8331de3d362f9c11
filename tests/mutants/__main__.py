from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutants import MUTANTS, draw
from tests.mutants.contracts import write
from tests.mutants.mutant import Overlay, Stale


def main(words: list[str]) -> int:
    if words == ["--write"]:
        write()
        return 0
    if words[:1] == ["draw"]:
        return draw.main(words[1:])
    chosen = [mutant for mutant in MUTANTS if not words or any(w in f"{mutant.file} {mutant.rule}" for w in words)]
    num_found = 0
    with tempfile.TemporaryDirectory() as folder:
        overlay = Overlay(Path(folder) / "overlay")
        for mutant in chosen:
            try:
                found = overlay.finds(mutant)
                outcome = "found" if found else "SURVIVED"
            except Stale as stale:
                found, outcome = False, f"STALE {stale}"
            num_found += found
            print(f"{outcome:<9} {mutant.file}: {mutant.rule} -> {mutant.test}", flush=True)
    print(f"mutation score: {num_found} of {len(chosen)}")
    return 0 if num_found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
