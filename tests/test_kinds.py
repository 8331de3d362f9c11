"""Who knows a kind of cache by name: sliding windows and recurrent states have rooms, and the house asks for neither.

Counted in the code, without docstrings and comments, and outside the rooms and the packages that compute or read
models: a file each of settings and device, what a layer keeps and why a hit ends. Both counts may only fall.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.memory.kinds.kind import PROTOCOLS, Kind, Kinds
from tests.imports import syntax, walk

PACKAGE = Path(__file__).parent.parent / "forebay"
ELSEWHERE = ("ops", "models", "families", "layers", "formats")

KINDS = {"window", "windows", "swa", "mamba", "recurrent", "state", "states", "snapshot", "snapshots", "tracking"}
# The state of a process, a connection or a row of counts: what /debug/state tells, not what a layer remembers.
OTHER_STATES = {
    "window_log_max",  # of zstd
    "check_xfer_state",
    *(
        "State",
        "_State",
        "GetState",
        "DebugState",
        "PoolState",
        "pool_state",
        "pool_states",
        "HiddenStates",
        "SchedulerState",
        "_RowState",
        "_states",
        "set_state",
    ),
    *("app_state", "server_state", "last_state", "debug_state", "_send_state", "_state_at", "state", "_state"),
    *("STATE_INTERVAL_S", "STATE_TIMEOUT_S", "max_lexer_states", "lexer_states"),
    *("current_state", "state_for", "TenantState", "tenant_states"),
}

ROOMS = ("memory/kinds/", "runtime/kinds/")  # whoever asks there is at home

NUM_FILES = 5
NUM_METHODS = 8  # of each protocol of a kind
NUM_BRANCHES = 4


def words(name: str) -> set[str]:
    """Of an identifier, in lower case: `num_window_pages` and `WindowPages` both have `window`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def names(tree: ast.AST) -> Iterator[str]:
    """Every identifier in it, those that it defines and imports among them."""
    for node in walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (*module.split("."), *(alias.name for alias in aliases))
            case ast.Import(names=aliases):
                yield from (part for alias in aliases for part in alias.name.split("."))


def kinds(tree: ast.AST) -> set[str]:
    """The identifiers that name a kind."""
    return {name for name in names(tree) if name not in OTHER_STATES and words(name) & KINDS}


def branches(tree: ast.AST) -> Iterator[ast.AST]:
    """What is decided, and asserted, by asking for a kind."""
    for node in walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                questions = [test]
            case ast.comprehension(ifs=questions):
                pass
            case ast.match_case(pattern=pattern):
                questions = [pattern]
            case _:
                continue
        yield from (question for question in questions if kinds(question))


@pytest.mark.parametrize(
    "source",
    [
        "class WindowPool: pass",
        "from forebay.memory import mamba_pool",
        "import forebay.memory.kinds.window.windows",
        "f(num_tracking=1)",
        "def swa_pages(): pass",
        "held.windows",
        "SWAPool()",
        "def f(state_slot): pass",
    ],
)
def test_who_names_a_kind_is_found(source: str) -> None:
    assert kinds(ast.parse(source))


@pytest.mark.parametrize("source", ["'''windows'''", "x = 1  # windows", "State()", "request.app.state", "restated"])
def test_who_does_not_is_not(source: str) -> None:
    assert not kinds(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "if held.windows is None: pass",
        "assert tracking is not None",
        "x = states.take() if states else None",
        "[page for page in pages if page in windows]",
        "while not num_states: pass",
        "match spec:\n    case SlidingWindow(): pass",
        "match spec:\n    case RecurrentState(): pass",
    ],
)
def test_who_asks_for_a_kind_is_found(source: str) -> None:
    assert len(list(branches(ast.parse(source)))) == 1


def counts() -> dict[str, int]:
    """Of every file that names a kind, how many branches ask for one."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE), syntax(path.read_text())
        if name.parts[0] not in ELSEWHERE and not str(name).startswith(ROOMS) and kinds(tree):
            found[str(name)] = len(list(branches(tree)))
    return found


def test_no_more_files_name_a_kind_and_no_more_branches_ask_for_one() -> None:
    found = counts()
    assert len(found) <= NUM_FILES, found
    assert sum(found.values()) <= NUM_BRANCHES, found


@pytest.mark.parametrize("interface", [Kind, *PROTOCOLS])
def test_interface_of_a_kind_has_few_methods(interface: type) -> None:
    methods = [name for name, member in vars(interface).items() if callable(member) or isinstance(member, property)]
    methods = [name for name in methods if not name.startswith("_")]
    assert len(methods) <= NUM_METHODS, methods


class Half(Kind):
    """A kind of whose protocol for requests a method is missing."""

    name = "half"

    def admit(self, *args: object) -> None: ...

    def return_slots(self, *args: object) -> None: ...


def test_kind_that_implements_a_protocol_in_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Half lacks \['release_all'\] of HeldKind"):
        Kinds([Half()])
