"""Which tests run each line of an area's source, recorded once by `coverage`: only they can find a change of it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coverage import CoverageData
from coverage.exceptions import CoverageException

from tests.mutants.mutant import REPOSITORY, Overlay

_KEPT: Final = REPOSITORY / "build" / "mutants"
_PYTEST: Final = ("--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutants.recorder")
_SETTINGS: Final = """[run]
data_file = {folder}/data
include = {root}/forebay/*
parallel = true
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, couldnt-parse
concurrency = thread, multiprocessing
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """`tests[file][line]` are the tests that run a line of a file below `forebay/`: node ids without parameters, and
    files whose fixtures or processes run it. `seconds` is how long each test takes, all its cases together. `failed`
    are those that fail without any change."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    failed: Sequence[str] = ()

    def by(self, file: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that run one of `lines`, and pass without a change."""
        return {test for line in lines for test in self.tests.get(file, {}).get(line, [])} - {*self.failed}

    def of(self, groups: Sequence[Sequence[str]], file: str, lines: Iterable[int]) -> list[list[str]]:
        """Return of each group of test files those tests that run one of `lines`, short ones first."""
        by_file: dict[str, set[str]] = {}
        for test in self.by(file, lines):
            by_file.setdefault(test.partition("::")[0], set()).add(test)
        chosen = [
            [({name} if name in by_file[name] else by_file[name]) for name in group if name in by_file]
            for group in groups
        ]
        return [
            [test for tests in sorted(group, key=self.seconds_of) for test in sorted(tests, key=self._seconds)]
            for group in chosen
            if group
        ]

    def seconds_of(self, tests: Iterable[str]) -> float:
        """Return how long tests and files of tests took when they were recorded."""
        return sum(map(self._seconds, tests))

    def _seconds(self, test: str) -> float:
        if "::" in test:
            return self.seconds.get(test, 0.0)
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(f"{test}::"))


def covered(overlay: Overlay, sources: Sequence[str], tests: Sequence[str]) -> Covered:
    """Return which of `tests`, files below `tests/`, run each line of `sources`, files below `forebay/`.

    Records those of them that have not been recorded with these sources yet.
    """
    folder = _KEPT / _digest(REPOSITORY / "forebay" / name for name in sources)
    kept = {name: folder / f"{_digest([REPOSITORY / 'tests' / name])}.json" for name in tests}
    if missing := [name for name, path in kept.items() if not path.exists()]:
        folder.mkdir(parents=True, exist_ok=True)
        told = _record(overlay, sources, missing)
        for name in missing:
            kept[name].write_text(json.dumps(_of_file(f"tests/{name}", told)))
    lines: dict[str, dict[int, list[str]]] = {name: {} for name in sources}
    seconds: dict[str, float] = {}
    failed: list[str] = []
    for path in kept.values():
        part = json.loads(path.read_text())
        seconds |= part["seconds"]
        failed += part["failed"]
        for name, of in part["tests"].items():
            for line, found in of.items():
                lines[name].setdefault(int(line), []).extend(found)
    return Covered(tests=lines, seconds=seconds, failed=failed)


def _digest(paths: Iterable[Path]) -> str:
    texts = b"".join(str(path).encode() + path.read_bytes() for path in paths)
    return hashlib.sha256(texts).hexdigest()[:16]


def _of_file(file: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return of a record the part of one file of tests."""

    def is_own(test: str) -> bool:
        return test.partition("::")[0] == file

    lines = {
        name: {line: own for line, found in of.items() if (own := [*filter(is_own, found)])}
        for name, of in told["tests"].items()
    }
    seconds = {test: value for test, value in told["seconds"].items() if is_own(test)}
    return {"tests": lines, "seconds": seconds, "failed": [*filter(is_own, told["failed"])]}


def _record(overlay: Overlay, sources: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
    folder = overlay.root / ".covered"
    folder.mkdir(exist_ok=True)
    settings, told = folder / "settings", folder / "told"
    settings.write_text(_SETTINGS.format(folder=folder, root=overlay.root))
    (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
    environment = {
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": f"{folder}{os.pathsep}{overlay.root}",
        "FOREBAY_TOLD": str(told),
        "PYTEST_CURRENT_TEST": "",  # of a test that records
    }
    files = [f"tests/{name}" for name in tests]
    overlay.python(["-m", "pytest", "-q", *_PYTEST, "-m", "not slow", *files], environment, limit_s=None)
    data = CoverageData(no_disk=True)
    for part in folder.glob("data.*"):
        one = CoverageData(str(part))
        with contextlib.suppress(CoverageException):  # a process that was killed wrote a part of it
            one.read()
            data.update(one)
        part.unlink()
    by_line = {name: data.contexts_by_lineno(str(overlay.root / "forebay" / name)) for name in sources}
    return {
        "tests": {
            name: {line: sorted({_test(context) for context in found if context}) for line, found in lines.items()}
            for name, lines in by_line.items()
        },
        **json.loads(told.read_text()),
    }


def _test(context: str) -> str:
    """Return the test of a context. A process has the name of the test that started it, with the phase: it may serve
    all tests of the file."""
    return context.partition("::")[0] if context.endswith(")") else context


def statement_lines(source: str, line: int, last: int) -> range | None:
    """Return the lines from the start of the innermost statement at `line` up to `last`.

    Returns None outside the bodies of functions: importing runs these lines, whichever test does so.
    """
    around = [
        node
        for node in ast.walk(ast.parse(source))  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    if not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in around[:-1]):
        return None
    return range(line if isinstance(around[-1], ast.Try) else around[-1].lineno, last + 1)
