"""What modules of the package and of its tests import."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "forebay"


def modules() -> list[Path]:
    """Return the files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the name by which a file below `ROOT` is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def syntax(source: str) -> ast.Module:
    """Parse a source once for all gates, which change nothing of the tree. `tests/conftest.py` clears what is kept."""
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a source's tree, its module first."""
    return tuple(walk(syntax(source)))


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that `ast.walk` yields, in its order and half its time."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif type(value) is list:
                nodes += [item for item in value if isinstance(item, ast.AST)]
    return nodes


SYNTAX_TREES: Final = syntax, nodes_of


@cache
def imported(source: str) -> frozenset[str]:
    """What is imported anywhere in it: modules and members of modules, in functions and under TYPE_CHECKING too."""
    return frozenset(imported_by(nodes_of(source)))


def imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    """Return what these nodes of a syntax tree import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def target(name: str, modules: Iterable[str]) -> str:
    """The module that importing `name` runs: itself, or whose member it is."""
    return name if name in modules else name.rpartition(".")[0] if name.rpartition(".")[0] in modules else ""
