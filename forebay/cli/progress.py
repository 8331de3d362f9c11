"""Progress on standard error, and only where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.base.units import human_bytes
from forebay.formats.store import DEFAULT_MODEL, Progress, ensure_default_model, models_folder


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


@contextmanager
def byte_progress(what: str) -> Iterator[Progress]:
    """A bar of bytes done, named `what`; nothing at all where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
