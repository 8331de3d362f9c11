"""A rule taken out of the source, and a copy of the package in which that is tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
_HANGS_S: Final = 600


class Stale(Exception):
    """The mutant no longer fits the code, or its test is not there: it proves nothing."""


@dataclass(frozen=True)
class Mutant:
    """`rule` in words; in `file` (below `forebay/`) `old`, which stands there once, becomes `new`; then `test` (a node
    id below `tests/`, without parameters) must fail. `rule` begins with the numbers of the contracts that it is of.
    """

    rule: str
    file: str
    old: str
    new: str
    test: str

    @property
    def contracts(self) -> list[str]:
        return list(takewhile(_is_contract, self.rule.split()))

    @property
    def words(self) -> str:
        """The rule without the numbers."""
        return " ".join(self.rule.split()[len(self.contracts) :])

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}: {self.rule}"

    def text(self, source: str) -> str:
        """The file with the rule taken out."""
        if source.count(self.old) != 1:
            raise Stale(f"{self.file} has the text {source.count(self.old)} times, not once: {self.old!r}")
        mutated = source.replace(self.old, self.new)
        compile(mutated, self.file, "exec")
        return mutated


def _is_contract(word: str) -> bool:
    return word[:1] == "C" and word[1:].isdigit()


class Overlay:
    """A copy of the package and of its tests, in which one rule at a time is taken out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(REPOSITORY / "forebay", root / "forebay")
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        shutil.copytree(REPOSITORY / "tests", root / "tests")

    def finds(self, mutant: Mutant) -> bool:
        """Whether the mutant's test fails. Stale where it cannot tell."""
        file = self.root / "forebay" / mutant.file
        right = file.read_text()
        file.write_text(mutant.text(right))
        try:
            return self._fails(mutant.test)
        finally:
            file.write_text(right)

    def _fails(self, test: str) -> bool:
        """Whether a test fails here: not its module, its fixtures or its name, which would prove nothing."""
        options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, f"tests/{test}"],
                cwd=self.root,
                # Bytecode is known by its source's second and size: two mutants within one second could be mixed up.
                env={**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=_HANGS_S,
            )
        except subprocess.TimeoutExpired as hangs:
            raise Stale(f"{test} hangs, where it should fail") from hangs
        if done.returncode == 1 and f"FAILED tests/{test}" in done.stdout:
            return True
        if done.returncode == 0 and " passed" in done.stdout:
            return False
        raise Stale(f"{test} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
