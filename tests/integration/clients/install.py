"""Install the clients of versions.toml below build/clients: all groups, or those named (node, agents, aider).

python -m tests.integration.clients.install [GROUP...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

_HERE: Final = Path(__file__).parent
FOLDER: Final = _HERE.parents[2] / "build" / "clients"
VERSIONS: Final = tomllib.loads((_HERE / "versions.toml").read_text())
GROUPS: Final[dict[str, dict[str, str]]] = {"node": VERSIONS["node"], **VERSIONS["python"]}


def _note(group: str) -> Path:
    """Return the file that lists what a group has been installed of."""
    return FOLDER / group / "installed.json"


def is_installed(group: str) -> bool:
    """Return whether a group is installed with the versions that are declared now."""
    note = _note(group)
    return note.exists() and json.loads(note.read_text()) == GROUPS[group]


def installed(group: str) -> Path:
    """Return the folder of a group. Skips the test if it is not installed."""
    if not is_installed(group):
        pytest.skip(f"the clients of the group {group} are not installed: make clients")
    return FOLDER / group


def install(group: str) -> None:
    """Install a group, unless it is installed."""
    if is_installed(group):
        return
    folder = FOLDER / group
    folder.mkdir(parents=True, exist_ok=True)
    wanted = GROUPS[group]
    if group == "node":
        (folder / "package.json").write_text('{"name": "forebay-clients", "private": true, "type": "module"}\n')
        names = [f"{name}@{version}" for name, version in wanted.items()]
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--force", *names], cwd=folder, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", "."], cwd=folder, check=True)
        names = [f"{name}=={version}" for name, version in wanted.items()]
        subprocess.run(["bin/python", "-m", "pip", "install", "-q", *names], cwd=folder, check=True)
    _note(group).write_text(json.dumps(wanted))


if __name__ == "__main__":
    for each in sys.argv[1:] or GROUPS:
        install(each)
        print(f"{each}: {', '.join(f'{name} {version}' for name, version in GROUPS[each].items())}")
