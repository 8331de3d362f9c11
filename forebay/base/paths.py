"""Where this user's files are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/forebay/<name>`, or `~/.cache/forebay/<name>`. Not created here."""
    return _folder("XDG_CACHE_HOME", ".cache") / name


def history_folder() -> Path:
    """`$XDG_STATE_HOME/forebay`, or `~/.local/state/forebay`. Not created here."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, otherwise: str) -> Path:
    base = os.environ.get(variable, "")
    root = Path(base) if os.path.isabs(base) else Path.home() / otherwise
    return root / "forebay"
