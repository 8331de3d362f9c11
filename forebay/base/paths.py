"""Where this user's files are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/forebay/<name>`, or `~/.cache/forebay/<name>`. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "forebay" / name
