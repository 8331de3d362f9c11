"""The circumstances of `forebay verify` in which an engine reaches the statements that mutants change.

A copy of the package with a probe before each of these statements is verified once. A mutant changes nothing where none
of its statements is reached: such circumstances need not run with it, and answers that were given alone hold for it.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from forebay.verify.run import Baseline
from tests.mutants.mutant import REPOSITORY, Mutant

ALONE: Final = "alone"
FOLDER: Final = "REACHED_FOLDER"  # the variable that names where a process leaves a file for each probe it has passed
_HIT: Final = f"__import__({__name__!r}, fromlist=['hit']).hit"
_hit: set[int] = set()


@dataclass(frozen=True, slots=True)
class Reached:
    """`lines[name]` are the changed statements, as (file, line), that are reached in a circumstance, or `ALONE`. The
    circumstances of the model are `names`; `baseline` has the answers without a mutant."""

    names: Sequence[str]
    baseline: Baseline = field(default_factory=Baseline)
    lines: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)

    def by(self, mutant: Mutant) -> set[str]:
        """Return where a mutant can change anything: everywhere if it changes what importing runs."""
        source = (REPOSITORY / "forebay" / mutant.file).read_text()
        places = changed_statements(source, mutant)
        everywhere = {ALONE, *self.names}
        if None in places:
            return everywhere
        return {name for name in everywhere if not self.lines[name].isdisjoint({(mutant.file, at) for at in places})}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(path: Path) -> Reached:
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Reached)
        return found


def changed_statements(source: str, mutant: Mutant) -> set[int | None]:
    """Return the first line of each innermost statement of a function that `mutant` changes, or adds lines behind or
    in front of; None for what is in no function."""
    before, after = source.splitlines(), source.replace(mutant.old, mutant.new).splitlines()
    places: set[int | None] = set()
    for kind, start, stop, _, _ in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            around = {_statement(source, start), _statement(source, start + 1)}
            places |= around - {None} or {None}
        elif kind != "equal":
            places |= {_statement(source, line) for line in range(start + 1, stop + 1)}
    return places


def _statement(source: str, line: int) -> int | None:
    around = [
        node
        for node in ast.walk(ast.parse(source))  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    in_function = any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in around[:-1])
    return around[-1].lineno if in_function else None


def probed(source: str, numbers: Mapping[int, int]) -> str:
    """Return the source with a call of `hit(numbers[line])` before the statement that begins at a line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            if isinstance(block, list):
                setattr(node, part, [*_with_probes(block, numbers)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _with_probes(block: Sequence[ast.stmt], numbers: Mapping[int, int]) -> Iterator[ast.stmt]:
    for statement in block:
        if statement.lineno in numbers:
            yield ast.parse(f"{_HIT}({numbers[statement.lineno]})").body[0]
        yield statement


def hit(number: int) -> None:
    """Leave a file for a probe in the folder that the environment names."""
    if number not in _hit:
        _hit.add(number)
        with contextlib.suppress(KeyError, FileNotFoundError):
            (Path(os.environ[FOLDER]) / str(number)).touch()
