"""The recipes of docs/contributing.md: each can be applied to the tree, and the tests that it names pass in a copy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruff import find_ruff_bin

from scripts.site.pages import DOCS, ROOT
from tests.deadlines import HANGS_S
from tests.docs.test_examples import blocks

PAGE = DOCS / "contributing.md"
RECIPES = re.findall(r"(?m)^## (Add .*)$", PAGE.read_text())
COPIED = ("forebay", "tests", "scripts")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for all recipes, each of which is taken back."""
    root = tmp_path_factory.mktemp("recipes")
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "docs").symlink_to(DOCS)  # which gates read
    return root


def section(title: str, folder: Path) -> Path:
    """Return a page of the recipe alone."""
    path = folder / "recipe.md"
    path.write_text(PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0])
    return path


def environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "GIT_CEILING_DIRECTORIES": "/"}


@pytest.fixture
def applied(request: pytest.FixtureRequest, copy: Path) -> Iterator[str]:
    """The text of a recipe, whose changes the copy has."""
    page = section(request.param, copy)
    changes = [text for language, text in blocks(page) if language == "diff"]
    assert changes, "the recipe changes nothing"
    done = []
    try:
        for change in changes:
            patch(copy, change)
            done.append(change)
        yield page.read_text()
    finally:
        for change in reversed(done):
            patch(copy, change, "--reverse")


def patch(copy: Path, change: str, *options: str) -> None:
    words = ["git", "apply", "--recount", "--unidiff-zero", *options, "-"]
    subprocess.run(words, cwd=copy, input=change, text=True, check=True, timeout=HANGS_S, env=environment(copy))


def lint(copy: Path, recipe: str) -> None:
    """Check the files that the recipe changes, as `make lint` does."""
    files = re.findall(r"(?m)^\+\+\+ b/(.*\.py)$", recipe)
    for words in (["check", "-q"], ["format", "-q", "--check"]):
        done = subprocess.run([find_ruff_bin(), *words, *files], cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ruff {words[0]}: {done.stdout[-2000:]}{done.stderr[-1000:]}"


@pytest.mark.parametrize("title", RECIPES)
def test_contributing_recipe_changes_lines_that_the_tree_has(title: str, tmp_path: Path) -> None:
    for language, text in blocks(section(title, tmp_path)):
        if language == "diff":
            patch(ROOT, text, "--check")


@pytest.mark.slow  # every time, that its changes can be applied: above
@pytest.mark.parametrize("applied", RECIPES, indirect=True)
def test_contributing_recipe_applied_to_a_copy_passes_its_gates(applied: str, copy: Path) -> None:
    gates = re.findall(r"`(tests/[^`]+)`", applied.rpartition("Run the gates")[2])
    assert gates, "the recipe names no gate"
    lint(copy, applied)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    whole = [gate for gate in gates if " " not in gate]
    for words in filter(None, [whole, *(shlex.split(gate) for gate in gates if " " in gate)]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *words],
            cwd=copy,
            env=environment(copy),
            capture_output=True,
            text=True,
            timeout=HANGS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
