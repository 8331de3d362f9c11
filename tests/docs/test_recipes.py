"""The recipes of docs/contributing.md: each is applied to a copy of the tree, whose tests it names then pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.site.pages import DOCS, ROOT
from tests.deadlines import HANGS_S
from tests.docs.test_examples import blocks

PAGE = DOCS / "contributing.md"
RECIPES = re.findall(r"(?m)^## (Add .*)$", PAGE.read_text())
COPIED = ("forebay", "tests", "scripts")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "docs").symlink_to(DOCS)  # which gates read
    return tmp_path


def section(title: str, folder: Path) -> Path:
    """Return a page of the recipe alone."""
    path = folder / "recipe.md"
    path.write_text(PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0])
    return path


@pytest.mark.parametrize("title", RECIPES)
def test_contributing_recipe_applied_to_a_copy_passes_its_gates(title: str, tree: Path) -> None:
    page = section(title, tree)
    changes = [text for language, text in blocks(page) if language == "diff"]
    assert changes, "the recipe changes nothing"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CEILING_DIRECTORIES": "/",
    }
    for change in changes:
        words = ["git", "apply", "--recount", "-"]
        subprocess.run(words, cwd=tree, input=change, text=True, check=True, timeout=HANGS_S, env=environment)
    gates = re.findall(r"`(tests/[a-z_/]+\.py)`", page.read_text().rpartition("Run the gates")[2])
    assert gates, "the recipe names no gate"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *gates]
    done = subprocess.run(
        words, cwd=tree, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
