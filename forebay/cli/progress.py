"""The default model, fetched while a person watches."""

from __future__ import annotations

import sys
from pathlib import Path

from forebay.base.progress import byte_progress
from forebay.base.units import human_bytes
from forebay.formats.store import DEFAULT_MODEL, ensure_default_model, models_folder


def pull_default_model() -> Path:
    """The default model's path; fetched with a progress bar if the cache has none."""
    target = models_folder() / DEFAULT_MODEL.file
    if target.is_file():
        return target
    print(f"fetching {DEFAULT_MODEL.name} ({human_bytes(DEFAULT_MODEL.num_bytes)}), once", file=sys.stderr)
    with byte_progress("download") as progress:
        path = ensure_default_model(progress)
    print(f"{path} ({human_bytes(path.stat().st_size)}, sha256 checked)", file=sys.stderr)
    return path
