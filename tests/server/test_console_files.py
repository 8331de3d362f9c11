"""What the page is made of: whose files it carries, and how much it loads before anything is asked."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from forebay.server import console

FOLDER = Path(console.__file__).parent
VENDOR = FOLDER / "vendor"
ASSETS = console.load_assets()
FIRST_LOAD_BYTES = 150_000


def test_vendored_files_are_those_of_the_versions_named() -> None:
    named = json.loads((VENDOR / "versions.json").read_text())
    for folder, package in named.items():
        there = {
            path.relative_to(VENDOR / folder).as_posix(): path
            for path in (VENDOR / folder).rglob("*")
            if path.is_file()
        }
        assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()} == package[
            "sha256"
        ]
        assert "LICENSE" in there
        assert package["version"]
    assert {path.name for path in VENDOR.iterdir()} == {*named, "versions.json"}


def loaded_first(name: str, seen: dict[str, int]) -> dict[str, int]:
    """File -> bytes of `name` and all that it names, but for what it imports when it is needed."""
    if name in seen:
        return seen
    text = ASSETS["/" if name == "index.html" else f"/console/{name}"].body.decode()
    seen[name] = len(text.encode())
    for other in re.findall(r'(?:src|href)="console/([^"]+)"', text):
        loaded_first(other, seen)
    if name.endswith(".js"):
        for other in re.findall(r'^(?:import|export)\b[^"();]*"\./([^"]+)"', text, re.MULTILINE):
            loaded_first(other, seen)
    return seen


def test_first_load_is_small() -> None:
    loaded = loaded_first("index.html", {})
    assert {"app.js", "chat.js", "store.js", "base.css"} <= set(loaded)
    assert not [name for name in loaded if name.startswith("vendor/")]
    assert sum(loaded.values()) <= FIRST_LOAD_BYTES, loaded
