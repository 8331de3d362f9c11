"""Compiled files in the user's cache. The name of each ends with the digest of its contents.

A file that was damaged, or that another user could have written, is not used: its code would run in the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from forebay.base.log import event, get_logger
from forebay.base.trust import why_untrusted

_MODE = 0o755  # whatever the umask: a group that may write a file could put its code into it

_log = get_logger("ops")


def find(folder: Path, stem: str, suffix: str) -> Path | None:
    """Return the file that was used last of those whose names begin with `stem`; None if none can be used. Each that
    cannot is logged."""
    found = []
    for path in folder.glob(f"{stem}-*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another process drops what is old
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found, reverse=True):
        try:
            reason = why_untrusted(path) or _damage(path)
        except OSError as error:
            reason = str(error)
        if not reason:
            return path
        _log.warning(event("compiled_file_ignored", path=path, reason=reason, effect="it is compiled again"))
    return None


def keep(made: Path, folder: Path, stem: str) -> Path:
    """Move a file into the cache, in one step."""
    made.chmod(_MODE)
    target = folder / f"{stem}-{_digest(made)}{made.suffix}"
    os.replace(made, target)
    return target


def _damage(path: Path) -> str:
    digest = _digest(path)
    return "" if path.stem.endswith(f"-{digest}") else f"it is damaged: the digest of its contents is {digest}"


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
