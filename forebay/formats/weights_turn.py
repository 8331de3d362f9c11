"""Turns at computing a file of the weights cache: of engines that start together with one key, one computes and writes
the file, and the others wait for it.

The turn is a lock on a file beside the one that is computed. It ends with the process that has it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from forebay.formats.weights_cache import SCRATCH, Key, path_of

POLL_S: Final = 0.1


@contextmanager
def turn(folder: Path, key: Key, *, most_s: float, waiting: Callable[[Path], None]) -> Iterator[bool]:
    """Wait until no other process has the turn at the file with this key, and have it inside. Yield whether it is had:
    not if others keep it for `most_s`, or if the folder cannot be written or has no locks.

    `waiting` is called once if there is something to wait for. Nothing of the turn is left in the folder.
    """
    path = folder / f"{SCRATCH}{path_of(folder, key).stem}.turn"
    descriptor = None
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _wait(path, time.monotonic() + most_s, waiting)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)


def _wait(path: Path, until: float, waiting: Callable[[Path], None]) -> int | None:
    descriptor = _locked(path)
    if descriptor is None:
        waiting(path)
    while descriptor is None and time.monotonic() < until:
        time.sleep(POLL_S)
        descriptor = _locked(path)
    return descriptor


def _locked(path: Path) -> int | None:
    """Lock the file at `path`, which is created. None if another process has the lock, or removed the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
