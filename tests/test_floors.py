"""Imports point down only, no file's imports lead back to it, and the host tower never meets torch."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.imports import PACKAGE, imported, modules, name_of, target

FLOORS = {
    "base": 0, "bench": 1, "formats": 1, "families": 2, "ops": 2, "backends": 3, "text": 3, "config": 4, "memory": 5,
    "requests": 6, "pools": 6, "scheduler": 7, "speculation": 7, "grammar": 7, "layers": 7, "models": 8,
    "runtime/host": 8.5, "runtime/graphs": 8.5, "runtime/kinds": 8.6, "runtime/sampling": 8.6, "runtime/steps": 8.7,
    "runtime/drafts": 8.8, "runtime": 9, "transfer": 9, "engine": 10.0, "engine/lifecycle": 10.1, "engine/ranks": 10.15,
    "engine/loop": 10.2, "engine/client": 10.3, "verify": 11, "http": 11, "server": 12, "route": 13, "cli": 14,
    "cluster": 14.5, "__init__.py": 15, "__main__.py": 15,
}  # fmt: skip
"""`http` carries bytes and decides who may send them; the server and the router are above it."""

HOST_PACKAGES = (
    "base",
    "bench",
    "backends",
    "formats",
    "families",
    "config",
    "text",
    "memory",
    "requests",
    "scheduler",
    "speculation",
    "grammar",
    "http",
    "server",
    "route",
    "cli",
    "cluster",
    "verify",
)
HOST_ENGINE_FILES = (
    "frames",
    "channel",
    "launch",
    "async_engine",
    "link",
    "mailboxes",
    "questions",
    "stream",
    "sizing",
    "embedding",
    "choice",
    "scores",
    "texts",
)
DEVICE_LIBRARIES = ("torch", "transformers", "triton")
HELP_LIBRARIES: dict[tuple[str, ...], set[str]] = {
    ("--help",): set(),
    ("serve", "--help"): {"msgspec", "typing_extensions"},
}


def room(parts: Sequence[str]) -> str:
    """Which of `FLOORS` a file is in, or what is imported, by its path or name below `forebay`."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOORS else parts[0]


def violations(package: str, source: str) -> list[str]:
    """What of its imports a module in `package` must not have."""
    wrong = []
    for name in imported(source):
        if name.startswith("."):
            wrong.append(f"{name}: relative")
        top, _, rest = name.partition(".")
        other = room(rest.split("."))
        if top == "forebay" and other not in FLOORS:
            wrong.append(f"{name}: the package itself, whose names reach up to the engine")
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
        "from forebay import __version__",
        "import forebay",
        "from ..base import errors",
    ],
)
def test_an_import_that_points_up_is_found_wherever_it_stands(source: str) -> None:
    assert violations("scheduler", source)


def test_a_family_s_configuration_does_not_meet_its_model() -> None:
    assert violations("families", "from forebay.models.families import llama")
    assert violations("families", "from forebay.models.decoder import decoder_spec")
    assert violations("models", "from forebay.families.llama import config") == []


def others_imported(family: str, source: str, families: set[str]) -> set[str]:
    """Which other families a module of a family imports: what several share is in `parts`."""
    found = set()
    for name in imported(source):
        for package in ("forebay.models.families.", "forebay.families."):
            if name.startswith(package):
                found.add(name.removeprefix(package).split(".")[0])
                break
    return (found & families) - {family}


def test_import_of_another_family_is_found() -> None:
    families = {"llama", "qwen2"}
    for source in ("from forebay.families.llama.config import X", "from forebay.models.families import llama"):
        assert others_imported("qwen2", source, families) == {"llama"}
        assert others_imported("parts", source, families) == {"llama"}
        assert others_imported("llama", source, families) == set()
    assert others_imported("qwen2", "from forebay.families.parts.latent import X", families) == set()


def test_no_family_imports_another() -> None:
    """Neither do the parts that they share."""
    folders, described = PACKAGE / "families", PACKAGE / "models" / "families"
    families = {path.parent.name for path in folders.glob("*/config.py")}
    files = [*folders.glob("*/**/*.py"), *described.rglob("*.py")]
    owner = {path: path.relative_to(described if described in path.parents else folders).parts[0] for path in files}
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in files
        for other in others_imported(owner[path].removesuffix(".py"), path.read_text(), families)
    }
    assert wrong == set()


FAMILY_FLOORS = ("base", "config", "parts")  # below a family's own folder


def test_shared_folders_of_families_import_down_only() -> None:
    folders = PACKAGE / "families"
    wrong = []
    for number, floor in enumerate(FAMILY_FLOORS):
        for path in (folders / floor).rglob("*.py"):
            above = [
                name
                for name in imported(path.read_text())
                if name.startswith(tuple(f"forebay.families.{other}." for other in FAMILY_FLOORS[number + 1 :]))
            ]
            wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in above]
    assert wrong == []


def test_every_package_has_a_floor() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    inner = {name for name in FLOORS if "/" in name and (PACKAGE / name / "__init__.py").is_file()}
    assert {*packages, *inner, "__init__.py", "__main__.py"} == set(FLOORS)


def test_imports_point_down_only() -> None:
    wrong = []
    for path in modules():
        inner = path.relative_to(PACKAGE)
        wrong += [f"{inner} imports {found}" for found in violations(room(inner.parts), path.read_text())]
    assert wrong == []


def circle(sources: dict[str, str]) -> list[str]:
    """Modules each of which imports the next, the last being the first; nothing where there are none."""
    imports = {name: {target(found, sources) for found in imported(source)} for name, source in sources.items()}
    try:
        TopologicalSorter({name: found - {name, ""} for name, found in imports.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found_on_one_floor_too() -> None:
    one = "def f():\n    from forebay.memory.two import X"
    assert circle({"forebay.memory.one": one, "forebay.memory.two": "from forebay.memory import one"})
    assert not circle({"forebay.memory.one": one, "forebay.memory.two": "from forebay.base import errors"})


def test_no_file_imports_what_imports_it() -> None:
    assert circle({name_of(path): path.read_text() for path in modules()}) == []


def host_modules() -> list[str]:
    found = []
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        if parts[0] in HOST_PACKAGES or (parts[0] == "engine" and path.stem in HOST_ENGINE_FILES):
            found.append(name_of(path))
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
    """But for backends, which are read without it and import it where they are made."""
    named = {
        name
        for name in host_modules()
        if not name.startswith("forebay.backends.")
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
