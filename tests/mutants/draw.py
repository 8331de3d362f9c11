"""Draws changes of an area's source at random, and runs the area's tests against each.

    python -m tests.mutants draw transfer --seed 7 --count 40

A change that survives is to be read: either a rule has no test, or the change has no effect. `MUTANTS` keeps the
rules that got a test.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from tests.mutants.covered import Covered, covered, statement_lines
from tests.mutants.mutant import REPOSITORY, Hangs, Overlay, Stale, tried
from tests.mutants.sites import Site, sites

_PATIENCE_S: Final = 90.0  # for starting Python, and for a machine that is busier than while the tests were recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Globs of files below `forebay/`, and globs of files and folders below `tests/` that hold their rules."""

    sources: Sequence[str]
    tests: Sequence[str]

    def files(self) -> list[str]:
        """Return the sources, relative to `forebay/`. Raises AssertionError if a glob matches nothing."""
        return _matching(REPOSITORY / "forebay", self.sources)

    def tests_of(self, file: str, root: Path = REPOSITORY) -> list[list[str]]:
        """Return the area's tests in a copy of the repository, relative to it, in the order in which to run them: those
        named like the module of `file`, those that import it, and the others.

        A test of the module itself finds most changes within seconds, without importing the others.
        """
        module, imported = Path(file).stem, f"forebay.{file.removesuffix('.py').replace('/', '.')}"
        named: list[str] = []
        importing: list[str] = []
        others: list[str] = []
        for test in _matching(root / "tests", self.tests):
            imports = imported in (root / "tests" / test).read_text()
            group = named if module in Path(test).stem else importing if imports else others
            group.append(f"tests/{test}")
        return [group for group in (named, importing, others) if group]


def _matching(root: Path, globs: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for glob in globs:
        matching = sorted(path for path in root.glob(glob) if path.name != "__init__.py")
        assert matching, f"{glob} matches nothing below {root.name}/"
        found.update((str(path.relative_to(root)), None) for path in matching)
    return list(found)


AREAS: Final = {
    "adapters": Area(
        sources=("*/adapters.py", "*/*/adapter*.py"),
        tests=("*/test_*adapter*.py", "integration/test_*adapter*.py", "cli/test_adapter*.py"),
    ),
    "cluster": Area(sources=("cluster/*.py",), tests=("cluster/test_*.py",)),
    "dialects": Area(sources=("server/api/*.py", "server/api/*/*.py"), tests=("server/test_*.py", "api/test_*.py")),
    "engine": Area(sources=("engine/**/*.py",), tests=("engine/test_*.py",)),
    "engine/loop": Area(sources=("engine/loop/*.py",), tests=("engine/test_*.py", "server/test_metrics.py")),
    "grammar": Area(sources=("grammar/*.py",), tests=("grammar/test_*.py",)),
    "hisparse": Area(
        sources=(
            "memory/kinds/resident/*.py",
            "runtime/kinds/resident.py",
            "pools/tiers.py",
            "pools/host_file.py",
            "ops/reference/tiers.py",
            "config/hisparse.py",
        ),
        tests=("*/test_hisparse.py", "*/test_resident*.py", "*/test_tier*.py", "pools/test_host_file.py"),
    ),
    "images": Area(
        sources=("*/pictures.py", "server/images/*.py"), tests=("*/test_*picture*.py", "server/images/test_*.py")
    ),
    "memory": Area(
        sources=("memory/**/*.py",),
        tests=(
            "memory/test_*.py",
            "scheduler/test_*states.py",
            "scheduler/test_windows.py",
            "scheduler/test_tiers.py",
            "simulation/test_*scenarios.py",
        ),
    ),
    "requests": Area(sources=("requests/*.py",), tests=("requests/test_*.py", "scheduler/test_*.py")),
    "route": Area(sources=("route/*.py",), tests=("route/test_*.py",)),
    "runtime": Area(sources=("runtime/**/*.py",), tests=("runtime/test_*.py",)),
    "scheduler": Area(
        sources=("scheduler/*.py",),
        tests=(
            "scheduler/test_*.py",
            "simulation/test_scenarios.py",
            "simulation/test_grammar_seeds.py",
            "simulation/test_tenant_seeds.py",
        ),
    ),
    "transfer": Area(sources=("transfer/**/*.py",), tests=("transfer/test_*.py",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A change of a file below `forebay/`."""

    file: str
    site: Site
    before: str  # the text that it replaces

    def __str__(self) -> str:
        return f"{self.file}:{self.site.line}: {self.site.operator}\n    - {self.before}\n    + {self.site.replacement}"


@lru_cache(maxsize=256)  # more than an area has files
def _changes_of(file: str, source: str) -> tuple[Drawn, ...]:
    return tuple(Drawn(file=file, site=site, before=site.quote(source)) for site in sites(source))


def draw(files: Sequence[str], count: int, seed: int) -> list[Drawn]:
    """Return `count` different changes of `files` below `forebay/`, even by file: each has its turn before any has two.

    A seed draws the same changes from the same sources. There are fewer if the files have no more.
    """
    chance = random.Random(seed)
    left: dict[str, list[Drawn]] = {}
    for file in files:
        left[file] = [*_changes_of(file, (REPOSITORY / "forebay" / file).read_text())]
        chance.shuffle(left[file])
    drawn: list[Drawn] = []
    while len(drawn) < count and (turn := [file for file in files if left[file]]):
        chance.shuffle(turn)
        drawn += [left[file].pop() for file in turn[: count - len(drawn)]]
    return drawn


def outcome(overlay: Overlay, area: Area, change: Drawn, covered: Covered) -> str:
    """Try a change: `found`, `SURVIVED`, or `UNSURE` with the reason.

    The test that fails with the change must pass without it: else it proves nothing. Tests that hang with the change
    find it, since they ended when they were recorded.
    """
    source = (overlay.root / "forebay" / change.file).read_text()
    if change.site.quote(source) != change.before:
        return f"UNSURE {change.file} was edited during the draw"
    groups = area.tests_of(change.file, overlay.root)
    lines = statement_lines(source, change.site.line, change.site.line + change.before.count("\n"))
    covering = covered.of(groups, change.file, lines) if lines else groups
    try:
        with overlay.changed(change.file, change.site.apply):
            failed = _first_failure(overlay, covering or groups, covered)
        if not failed:
            return "SURVIVED" if covering else "SURVIVED, no test runs it"
        return f"UNSURE {failed} fails without the change, too" if overlay.first_failure([failed]) else "found"
    except Hangs:
        return "found"
    except Stale as stale:
        return f"UNSURE {stale}"


def _first_failure(overlay: Overlay, groups: Sequence[Sequence[str]], covered: Covered) -> str:
    limits_s = [_PATIENCE_S + 3 * covered.seconds_of(group) for group in groups]
    passing = [[*group, *(f"--deselect={test}" for test in covered.failed)] for group in groups]
    return next(filter(None, map(overlay.first_failure, passing, limits_s)), "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants draw")
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that are tried at a time")
    options = parser.parse_args(arguments)
    area = AREAS[options.area]
    drawn = draw(area.files(), options.count, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        lines = covered(Overlay(Path(folder) / "covered"), area.files(), _matching(REPOSITORY / "tests", area.tests))
    counts: Counter[str] = Counter()
    for change, result in tried(drawn, lambda overlay, change: outcome(overlay, area, change, lines), options.jobs):
        counts[re.split("[ ,]", result)[0]] += 1
        print(f"{result:<8} {str(change).partition(chr(10))[0] if result == 'found' else change}", flush=True)
    unsure = f", {counts['UNSURE']} unsure" if counts["UNSURE"] else ""
    print(f"{options.area}, seed {options.seed}: {counts['found']} of {len(drawn)} found{unsure}")
    return 0
