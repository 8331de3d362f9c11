"""A test that makes an engine states the type that it computes in, for `auto` is another type on another CPU.

Two engines of one test, of which one states it and one does not, agree on some machines only; so does an engine beside
a number. An oracle takes the settings of the server that it is compared with (`Tree.computes`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.imports import walk

ROOT = Path(__file__).parent.parent
MAKERS: Final = {"LLM", "build_engine", "Tree", "serving"}
COMMANDS: Final = {"serve", "generate", "perplexity"}  # behind `*FOREBAY`
_MAKER: Final = re.compile(rf"\b({'|'.join(sorted(MAKERS))})\s*\(|FOREBAY\b")
# Makers of these names that make no engine.
HOMONYMS: Final = {
    "tests/test_mentions.py",
    "tests/server/test_signals.py",
    "tests/api/test_enforced.py",
    "tests/integration/tree.py",  # which passes its words on
}


@cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def defined(path: Path) -> dict[str, list[ast.stmt]]:
    """Return what each name of a module may stand for: assignments, functions, imports from test modules."""
    found: dict[str, list[ast.stmt]] = {}
    for node in walk(module(path)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.setdefault(name, []).append(node)
            case ast.FunctionDef(name=name):
                found.setdefault(name, []).append(node)
            case ast.ImportFrom(module=str(source), names=names) if source.startswith("tests."):
                for each in names:
                    found.setdefault(each.asname or each.name, []).append(node)
    return found


def nearest(path: Path, name: str, line: int) -> ast.stmt | None:
    """Return the last definition of a name above a line, else the last of its module."""
    nodes = sorted(defined(path).get(name, []), key=lambda node: node.lineno)
    return next((node for node in reversed(nodes) if node.lineno < line), nodes[-1] if nodes else None)


def states_type(path: Path, node: ast.AST, seen: frozenset[tuple[Path, str]] = frozenset()) -> bool:
    """Return whether an expression, or whatever its names stand for, has the setting `dtype`."""
    for part in walk(node):
        match part:
            case ast.keyword(arg="dtype") | ast.Attribute(attr="computes"):
                return True
            case ast.Constant(value=str(word)) if word == "dtype" or word.startswith("--dtype"):
                return True
            case ast.Name(id=name) if (path, name) not in seen:
                if name_states_type(path, name, part.lineno, seen | {(path, name)}):
                    return True
    return False


def name_states_type(path: Path, name: str, line: int, seen: frozenset[tuple[Path, str]]) -> bool:
    match nearest(path, name, line):
        case None:
            return False
        case ast.ImportFrom(module=str(source), names=names):
            own = next(each.name for each in names if name in (each.asname, each.name))
            other = ROOT / (source.replace(".", "/") + ".py")
            return other.exists() and name_states_type(other, own, sys.maxsize, seen)
        case node:
            return states_type(path, node, seen)


def settings_of(call: ast.Call | ast.List) -> Iterator[ast.AST]:
    """Yield what may hold settings: flags, keywords, dictionaries. A model's path holds none."""
    parts = call.elts if isinstance(call, ast.List) else call.args
    for part in parts:
        match part:
            case ast.Starred() | ast.Constant() | ast.JoinedStr():
                yield part
            case ast.Attribute(
                value=ast.Call(func=ast.Name(id="resolve"), args=[ast.Dict(keys=keys, values=values), *_])
            ):
                yield from (key or value for key, value in zip(keys, values, strict=True))
            case ast.Attribute(value=ast.Call(func=ast.Name(id="resolve")) | ast.Name(), attr="engine"):
                yield part
    if isinstance(call, ast.Call):
        yield from (
            each.value if each.arg is None else ast.keyword(each.arg, ast.Constant(0)) for each in call.keywords
        )


def makers(tree: ast.Module) -> Iterator[ast.Call | ast.List]:
    """Yield each call that makes an engine, and each command line that does."""
    for node in walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in MAKERS:
                yield node
            case ast.List(elts=[ast.Starred(value=ast.Name(id="FOREBAY")), ast.Constant(value=str(word)), *_]):
                if word in COMMANDS:
                    yield node


def unstated(path: Path) -> list[str]:
    """Return a line for each engine whose type the CPU chooses."""
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    if not _MAKER.search(path.read_text()):
        return []  # unparsed: most of the tests make no engine
    return [
        f"{where}:{call.lineno} {ast.unparse(call)[:80]}"
        for call in makers(module(path))
        if not any(states_type(path, part) for part in settings_of(call))
    ]


def test_engines_of_tests_state_their_type() -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if str(path.relative_to(ROOT)) not in HOMONYMS]
    found = [line for path in files for line in unstated(path)]
    assert not found, 'the CPU chooses the type of these engines: state dtype="float32"\n' + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("LLM(path)", True),
        ("LLM(path, kv_cache_dtype='int8')", True),
        ("LLM(path, dtype='float32')", False),
        ("FLAGS = {'dtype': 'float32'}\nLLM(path, **FLAGS)", False),
        ("FLAGS = {'page_size': 4}\nLLM(path, **FLAGS)", True),
        ("path = make(dtype='float32')\nLLM(path, page_size=4)", True),
        ("serving(folder, model, '--dtype=float32')", False),
        ("SMALL = ('--dtype', 'float32')\nPATIENT = (*SMALL, '-v')\nTree(folder, *PATIENT)", False),
        ("Tree(folder, '--page-size=4')", True),
        ("LLM(path, **tree.computes)", False),
        ("def flags():\n    return {'dtype': 'float32'}\nbuild_engine(resolve(flags()).engine)", False),
        ("build_engine(resolve({'model': str(model)}).engine)", True),
        ("run([*FOREBAY, 'serve', '--port', port])", True),
        ("run([*FOREBAY, 'chat', '--url', url])", False),
    ],
)
def test_unstated_finds_an_engine_without_its_type(source: str, is_found: bool, tmp_path: Path) -> None:
    path = tmp_path / "test_sample.py"
    path.write_text(source)
    assert bool(unstated(path)) == is_found
