"""Imports point down only, and the host tower never meets torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "forebay"

FLOORS = {
    "base": 0, "formats": 1, "config": 2, "ops": 2, "text": 2, "memory": 3, "requests": 4, "pools": 4, "scheduler": 5,
    "layers": 5, "models": 6, "runtime": 7, "engine": 9, "server": 10, "cli": 11,
}  # fmt: skip

HOST_PACKAGES = ("base", "formats", "config", "text", "memory", "requests", "scheduler", "server", "cli")
HOST_ENGINE_FILES = ("frames", "channel", "launch", "async_engine", "stream", "sizing")
DEVICE_LIBRARIES = ("torch", "transformers", "triton")
HELP_LIBRARIES: dict[tuple[str, ...], set[str]] = {
    ("--help",): set(),
    ("serve", "--help"): {"msgspec", "numpy", "typing_extensions", "uvloop"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported(source: str) -> set[str]:
    """Every module that is imported anywhere in it, inside functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + (node.module or "")}
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "forebay"}
    return names


def violations(package: str, source: str) -> list[str]:
    """What of its imports a module in `package` must not have."""
    wrong = []
    for name in imported(source):
        if name.startswith("."):
            wrong.append(f"{name}: relative")
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "forebay" and other in FLOORS and other != package and FLOORS[other] >= FLOORS[package]:
            wrong.append(f"{name}: floor {FLOORS[other]} from floor {FLOORS[package]}")
    return wrong


@pytest.mark.parametrize(
    "source",
    [
        "from forebay.server import app",
        "def f():\n    import forebay.server.app",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from forebay.cli import main",
        "from forebay import server",
        "from ..base import errors",
    ],
)
def test_an_import_that_points_up_is_found_wherever_it_stands(source: str) -> None:
    assert violations("scheduler", source)


def test_every_package_has_a_floor() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == set(FLOORS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    assert violations(path.relative_to(PACKAGE).parts[0], path.read_text()) == []


def host_modules() -> list[str]:
    found = []
    for path in modules():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in HOST_PACKAGES or (parts[0] == "engine" and parts[-1] in HOST_ENGINE_FILES):
            found.append(".".join(("forebay", *parts)).removesuffix(".__init__"))
    return found


def test_the_host_tower_imports_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {host_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    met = [m for m in {DEVICE_LIBRARIES!r} if m in sys.modules]\n"
        "    if met: sys.exit(f'{name} imports {met}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_host_module_names_torch() -> None:
    named = {
        name
        for name in host_modules()
        for path in [PACKAGE.parent.joinpath(*name.split("."))]
        for file in [path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"]
        if any(m.partition(".")[0] in DEVICE_LIBRARIES for m in imported(file.read_text()))
    }
    assert named == set()


@pytest.mark.parametrize(("arguments", "libraries"), HELP_LIBRARIES.items(), ids=map(" ".join, HELP_LIBRARIES))
def test_help_loads_little(arguments: tuple[str, ...], libraries: set[str]) -> None:
    """It answers at once where nothing is imported that takes time: torch would be a second, a web framework half."""
    code = (
        "import contextlib, io, sys\n"
        "before = set(sys.modules)\n"
        "from forebay.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({list(arguments)!r})\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    installed = set(importlib.metadata.packages_distributions()) - {"forebay"}
    assert set(done.stdout.split()) & installed <= libraries
