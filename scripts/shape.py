"""Measures the shape of the package: complexity, methods of an object, chains of classes, and lengths.

python3 scripts/shape.py            # what a review should look at: long files and functions, for information
python3 scripts/shape.py --limits   # what exceeds the limits that tests/test_sizes.py holds

Triton's kernels and vendored scripts are not measured.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent / "forebay"
UNMEASURED: Final = (PACKAGE / "ops/triton", PACKAGE / "server/console/vendor")
LANGUAGES: Final = (".py", ".cpp", ".h", ".js", ".css", ".html")
LONG_FILE: Final = 400  # lines; longer ones are printed for a review
LONG_FUNCTION: Final = 45
MAX_COMPLEXITY: Final = 12
MAX_METHODS: Final = 25

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES: Final = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)
_VALUES: Final = {"Protocol", "NamedTuple", "Struct", "TypedDict", "BaseModel"}
"""Bases whose subclasses are declarations: a chain of these is no object cut in two."""


def files() -> dict[str, str]:
    """Return the text of each measured file, by its path in the package."""
    found = (path for path in sorted(PACKAGE.rglob("*")) if path.suffix in LANGUAGES)
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in found if not {*UNMEASURED} & {*path.parents}}


def parsed(texts: Mapping[str, str]) -> dict[str, ast.Module]:
    """Return the syntax trees of the files in Python."""
    return {path: ast.parse(text) for path, text in texts.items() if path.endswith(".py")}


# -- lengths -----------------------------------------------------------------------------------------------------------


def long_files(texts: Mapping[str, str]) -> dict[str, int]:
    """Return the number of lines of each file that has more than `LONG_FILE`."""
    lengths = {path: len(text.splitlines()) for path, text in texts.items()}
    return {path: length for path, length in lengths.items() if length > LONG_FILE}


def long_functions(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the number of lines of each function that has more than `LONG_FUNCTION`, docstring included."""
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions(trees)}
    return {name: length for name, length in lengths.items() if length > LONG_FUNCTION}


# -- complexity --------------------------------------------------------------------------------------------------------


def functions(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, Function]]:
    """Yield each function with its name, "path:Class.function"."""
    for path, tree in trees.items():
        yield from _functions_in(tree, f"{path}:")


def _functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        is_scope = isinstance(child, Function | ast.ClassDef)
        yield from _functions_in(child, f"{prefix}{child.name}." if is_scope else prefix)


def complexity(function: Function) -> int:
    """Count the paths through a function: 1, and 1 for each branch, loop, handler, case, further operand of `and` and
    `or`, and part of a comprehension. Functions inside of it count for themselves."""
    count, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        nodes.extend(ast.iter_child_nodes(node))
    return count


def complex_functions(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the complexity of each function above `MAX_COMPLEXITY`; of functions of one name the highest."""
    found: dict[str, int] = {}
    for name, node in functions(trees):
        count = complexity(node)
        if count > MAX_COMPLEXITY:
            found[name] = max(count, found.get(name, 0))
    return found


# -- classes -----------------------------------------------------------------------------------------------------------


@dataclass
class Class:
    """A class at the top of a file. `bases` are those in the package, `subclasses` the names of its direct ones."""

    path: str
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    subclasses: list[str] = field(default_factory=list)

    @property
    def own_methods(self) -> set[str]:
        return {node.name for node in self.node.body if isinstance(node, Function)}

    @property
    def is_declaration(self) -> bool:
        """Whether it is a protocol, a dataclass or another declaration of values."""
        decorators = {ast.unparse(each).split("(")[0].split(".")[-1] for each in self.node.decorator_list}
        bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in self.node.bases}
        return "dataclass" in decorators or bool(bases & _VALUES)


class Classes:
    """All classes of the package by name, "path:Class"; and the files that name each."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._trees = trees
        self._imports = {path: dict(_imports(tree, trees)) for path, tree in trees.items()}
        self.all: dict[str, Class] = {}
        self.named_in: dict[str, set[str]] = defaultdict(set)
        for path, tree in trees.items():
            classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
            self.all |= {f"{path}:{node.name}": Class(path, node) for node in classes}
        for name, each in self.all.items():
            for base in each.node.bases:
                target = self._resolved(each.path, ast.unparse(base).split("[")[0])
                if target in self.all:
                    each.bases.append(target)
                    self.all[target].subclasses.append(name)
        for path in trees:
            for name in self._imports[path]:
                self.named_in[self._resolved(path, name)].add(path)

    def _resolved(self, path: str, name: str) -> str:
        """Return where a name of a file is defined, through as many imports as it takes."""
        first, _, attribute = name.partition(".")
        for _ in range(len(self._trees)):
            target = self._imports.get(path, {}).get(first)
            if target is None:
                return f"{path}:{first}" + (f".{attribute}" if attribute else "")
            path, first = target
            if not first:  # a module was imported: the name is an attribute of it
                first, _, attribute = attribute.partition(".")
        raise AssertionError(f"imports of {name} run in a circle at {path}")

    def lineage(self, name: str) -> set[str]:
        """Return a class and all its bases in the package."""
        return {name}.union(*(self.lineage(base) for base in self.all[name].bases))

    def methods(self, name: str) -> set[str]:
        """Return the names of all methods and properties of an object of this class."""
        return set().union(*(self.all[each].own_methods for each in self.lineage(name)))

    def large_objects(self) -> dict[str, int]:
        """Return the number of methods of each object that has more than `MAX_METHODS`, inherited ones included."""
        counts = {name: len(self.methods(name)) for name in self.all}
        return {name: count for name, count in counts.items() if count > MAX_METHODS}

    def chains(self) -> set[str]:
        """Return the classes that have one subclass in the package and that no third file names: an object cut in
        two. Protocols and declarations of values may be."""
        found = set()
        for name, each in self.all.items():
            declared = any(self.all[base].is_declaration for base in self.lineage(name))
            if len(each.subclasses) == 1 and not declared:
                subclass = self.all[each.subclasses[0]]
                if self.named_in[name] <= {subclass.path, each.path}:
                    found.add(name)
        return found


def _imports(tree: ast.Module, trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the names that a file imports from the package: the file of each, and the name there, "" for a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE.name:
            folder = "/".join(node.module.split(".")[1:])
            for alias in node.names:
                own, inside = alias.asname or alias.name, f"{folder}/{alias.name}".lstrip("/")
                module = next((path for path in (f"{inside}.py", f"{inside}/__init__.py") if path in trees), None)
                if module:
                    yield own, (module, "")
                else:
                    yield own, (f"{folder}.py" if f"{folder}.py" in trees else f"{folder}/__init__.py", alias.name)


def main(words: list[str]) -> int:
    gc.disable()  # nothing is garbage, and the collector takes three quarters of the time to parse
    texts = files()
    trees = parsed(texts)
    if "--limits" in words:
        classes = Classes(trees)
        _show(f"complexity above {MAX_COMPLEXITY}", complex_functions(trees))
        _show(f"methods above {MAX_METHODS}", classes.large_objects())
        _show("one subclass, which alone names it", Counter(classes.chains()))
        return 0
    _show(f"warning: lines above {LONG_FILE}", long_files(texts))
    _show(f"warning: lines above {LONG_FUNCTION}", long_functions(trees))
    return 0


def _show(heading: str, found: Mapping[str, int]) -> None:
    for name, count in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        print(f"{heading}: {name} ({count})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
