"""The layers of `transfer/`: bytes (`wire`), transports of chunks on them (`transports`), tickets as data (`state`),
sessions on top of all (`session`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.imports import walk

FOLDER = Path(__file__).parent.parent / "forebay" / "transfer"
PREFIX = "forebay.transfer."
MOST_ARROWS = 34  # may only shrink; without those of transports, each of which is one file that may come and go
MAY_IMPORT = {
    "wire": {"wire"},
    "state": {"state"},
    "transports": {"wire", "transports"},
    "session": {"wire", "state", "transports", "session"},
}
MOST_METHODS = 18


def trees() -> dict[str, ast.Module]:
    """Each file by its module's name below `forebay.transfer`."""
    paths = {".".join(path.relative_to(FOLDER).with_suffix("").parts): path for path in sorted(FOLDER.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items()}


def imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the folder that a file imports, imports inside functions included."""
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX.rstrip(".")):
            package = (node.module or "").removeprefix(PREFIX.rstrip(".")).removeprefix(".")
            for alias in node.names:
                member = f"{package}.{alias.name}".removeprefix(".")
                found.add(member if member in modules else package)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(PREFIX) for alias in node.names if alias.name.startswith(PREFIX)}
    return found


def arrows() -> set[tuple[str, str]]:
    files = trees()
    return {(name, other) for name, tree in files.items() for other in imports(tree, {*files})}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in walk(tree) if isinstance(node, ast.ClassDef))


def num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(member, ast.FunctionDef) for member in node.body)


def callable_fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass or named tuple that are annotated with a function's type."""
    heads = {ast.unparse(part).partition("(")[0] for part in (*node.decorator_list, *node.bases)}
    if not heads & {"dataclass", "NamedTuple"}:
        return []
    fields = (member for member in node.body if isinstance(member, ast.AnnAssign))
    return [ast.unparse(field.target) for field in fields if "Callable" in ast.unparse(field.annotation)]


def test_layers_import_nothing_above_or_beside_them() -> None:
    for name, other in arrows():
        layer, imported = name.partition(".")[0], other.partition(".")[0]
        if layer in MAY_IMPORT:
            assert imported in MAY_IMPORT[layer], f"{name} imports {other}"


def test_layers_only_sessions_import_a_transport_and_only_that_of_their_connections() -> None:
    above = {(name, other) for name, other in arrows() if not name.startswith("transports.")}
    found = {(name, other) for name, other in above if other.startswith("transports.")}
    assert found == {("session.connection", "transports.tcp")}


def test_layers_arrows_between_files_do_not_grow() -> None:
    found = {(name, other) for name, other in arrows() if not name.startswith("transports.")}
    assert len(found) <= MOST_ARROWS, sorted(found)
    assert ("session.peers", "wire.frames") in found


def test_layers_classes_have_few_methods_and_no_dataclass_holds_functions() -> None:
    for name, tree in trees().items():
        for node in classes(tree):
            assert num_methods(node) <= MOST_METHODS, f"{name}: {node.name}"
            assert not callable_fields(node), f"{name}: {node.name}"


def test_layers_dataclass_with_a_function_is_found() -> None:
    source = "@dataclass(slots=True)\nclass A:\n    call: Callable[[], None]\n    n: int\n    def f(self): ...\n"
    [node] = classes(ast.parse(source))
    assert callable_fields(node) == ["call"]
    assert num_methods(node) == 1
