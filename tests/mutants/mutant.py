"""A rule taken out of the source, and a copy of the package in which that is tried."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
_HANGS_S: Final = 600
_BETWEEN: Final = "\n\n\n"  # functions and classes of a module
_NOT_LINKED: Final = {"build", "dist"}  # what they hold is of the repository's own code

_Change = TypeVar("_Change")
_Outcome = TypeVar("_Outcome")


class Stale(Exception):
    """The mutant no longer fits the code, or its tests are not there or do not end: it proves nothing."""


class Hangs(Stale):
    """The tests take far longer than they should."""


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
        start = source.index(self.old)
        part = statements_around(mutated, start, start + len(self.new))
        try:
            compile(part, self.file, "exec")
        except SyntaxError:  # the part may begin in a string of several lines
            compile(mutated, self.file, "exec")
        return mutated


def statements_around(source: str, start: int, end: int) -> str:
    """Return the functions and classes of a formatted file in which the characters from `start` to `end` are."""
    first = source.rfind(_BETWEEN, 0, start)
    last = source.find(_BETWEEN, end)
    return source[max(0, first) : last if last >= 0 else len(source)]


def _is_contract(word: str) -> bool:
    return word[:1] == "C" and word[1:].isdigit()


class Overlay:
    """A copy of the package, its scripts and its tests, in which one rule at a time is taken out.

    The other folders and files that tests read, such as `docs`, are links to those of the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("forebay", "scripts", "tests"):
            shutil.copytree(REPOSITORY / folder, root / folder)
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        for path in REPOSITORY.iterdir():
            if path.name not in _NOT_LINKED and not path.name.startswith(".") and not (root / path.name).exists():
                (root / path.name).symlink_to(path)

    def finds(self, mutant: Mutant) -> bool:
        """Whether the mutant's test fails. Raises Stale if it cannot tell."""
        with self.changed(mutant.file, mutant.text):
            return self._fails_itself(mutant.test)

    @contextmanager
    def changed(self, file: str, change: Callable[[str], str]) -> Iterator[None]:
        """Replace the text of a file below `forebay/` by `change` of it, inside the block."""
        path = self.root / "forebay" / file
        right = path.read_text()
        path.write_text(change(right))
        try:
            yield
        finally:
            path.write_text(right)

    def first_failure(self, tests: Sequence[str], limit_s: float = _HANGS_S) -> str:
        """Return the first of the quick tests of `tests` that fails here, or the file that cannot be imported; "" if
        all pass. If a signal ends them, or their `conftest.py` cannot be imported, the first of `tests` stands for all.
        Raises Hangs after `limit_s`, and Stale if pytest cannot run them."""
        try:
            done = self._run(["-m", "not slow", *tests], limit_s)
        except subprocess.TimeoutExpired as hangs:
            raise Hangs(f"the tests take more than {limit_s:.0f} s") from hangs
        if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if done.returncode < 0 or "ImportError while loading conftest" in done.stderr:
            return tests[0]
        if found := re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[| - |$)", done.stdout, re.MULTILINE):
            return found[1]
        raise Stale(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")

    def _fails_itself(self, test: str) -> bool:
        """Whether a test fails here: not its module, its fixtures or its name, which would prove nothing.

        The cases of the short tier decide, if the test has any there.
        """
        try:
            done = self._run(["-m", "not slow", f"tests/{test}"])
            if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                done = self._run(["-m", "", f"tests/{test}"])
        except subprocess.TimeoutExpired as hangs:
            raise Stale(f"{test} hangs, where it should fail") from hangs
        if done.returncode == 1 and f"FAILED tests/{test}" in done.stdout:
            return True
        if done.returncode == 0 and " passed" in done.stdout:
            return False
        raise Stale(f"{test} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")

    def _run(self, arguments: Sequence[str], limit_s: float = _HANGS_S) -> subprocess.CompletedProcess[str]:
        """Run pytest here up to the first failure. Raises TimeoutExpired after `limit_s`."""
        options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        return self.python(["-m", "pytest", *options, *arguments], {"PYTHONPATH": str(self.root)}, limit_s)

    def python(
        self, arguments: Sequence[str], environment: Mapping[str, str], limit_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python here. Raises TimeoutExpired after `limit_s`, once the processes that it started are killed."""
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            # Bytecode is known by its source's second and size: two mutants within one second could be mixed up.
            env={**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def tried(
    changes: Sequence[_Change], attempt: Callable[[Overlay, _Change], _Outcome], jobs: int
) -> Iterator[tuple[_Change, _Outcome]]:
    """Yield each change and the result of `attempt` with it in a copy of the package, in the given order; `jobs` run
    at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        overlays: SimpleQueue[Overlay] = SimpleQueue()
        for number in range(jobs):
            overlays.put(Overlay(Path(folder) / str(number)))

        def try_one(change: _Change) -> _Outcome:
            overlay = overlays.get()
            try:
                return attempt(overlay, change)
            finally:
                overlays.put(overlay)

        yield from zip(changes, threads.map(try_one, changes), strict=True)
