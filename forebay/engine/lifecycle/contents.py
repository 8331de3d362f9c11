"""The contents of a mapped file of the weights cache, compared with their checksums behind the first answer.

A start checks the file's header alone: reading all of it would take as long as the cache saves. A disk may damage a
file afterwards. So a thread of low priority reads it once an answer is out, and the engine ends if anything differs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.log import event, get_logger
from forebay.base.wake import Wake
from forebay.formats.weights_cache import CacheFile, Unusable
from forebay.requests.updates import Update

_NICENESS: Final = 19

log = get_logger("engine")


class ContentsCheck:
    """Belongs to the engine's thread. `fileno` is readable once the contents are known to differ."""

    def __init__(self, file: CacheFile, path: Path) -> None:
        """Keeps a descriptor of its own until the check has ended."""
        self._file, self._path = file.duplicate(), path
        self._error: ModelError | None = None
        self._wake = Wake()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._wake.fileno()

    def note(self, updates: Iterable[Update]) -> None:
        """Begin once one of the updates ends a request. Raises ModelError if the contents differ."""
        if self._error is not None:
            raise self._error
        if self._thread is None and any(update.finish is not None for update in updates):
            self._thread = threading.Thread(target=self._run, name="weights-check", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the end of a check that has begun."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a thread of Linux has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._file.check_on_disk()
            log.info(event("weights_cache_checked", path=self._path))
        except (Unusable, OSError) as error:
            with contextlib.suppress(OSError):  # else every later start would map it again
                self._path.unlink()
            self._error = ModelError(
                f"the file of the weights cache {self._path} is not as it was written ({error}): it was removed; start "
                "again, and the weights are computed from the checkpoint. Answers so far may be wrong; check the disk",
            )
            self._wake.set()
        finally:
            os.close(self._file.descriptor)
