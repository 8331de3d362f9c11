"""Which users could have written a file that this user's processes load or obey."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def has_trusted_writers(file: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether the writers of a file are trusted: this user and root alone, or the group that shares its folder.

    A folder is shared by a group of this process if it belongs to the group and has the setgid bit. The group may write
    it, and no other user. Kubernetes sets up volumes so. Files in it that belong to the group may have been written by
    any member.
    """
    if file.st_mode & stat.S_IWOTH:
        return False
    if file.st_gid == folder.st_gid and _is_shared(folder):
        return True
    return file.st_uid in (0, os.geteuid()) and not file.st_mode & stat.S_IWGRP


def why_untrusted(path: Path) -> str:
    """Return why another user could have written a file that is loaded by its path, or put it there; "" if none could.
    Raises OSError."""
    folder = path.parent.stat()
    for name, status in ((path.parent, folder), (path, path.lstat())):
        if not has_trusted_writers(status, folder):
            mode = stat.S_IMODE(status.st_mode)
            return f"user {status.st_uid} owns {name} with mode {mode:o}: another user could write it"
    return ""


def closed_folder(path: Path) -> Path:
    """Create a folder that no other user can write, or take that from them in one that this user owns. Raises
    ConfigError for the folder of another user, and OSError."""
    path.mkdir(parents=True, exist_ok=True)
    status = path.stat()
    if status.st_mode & _OTHERS_WRITE and status.st_uid == os.geteuid() and not _is_shared(status):
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        status = path.stat()
    if not has_trusted_writers(status, status):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, which could change files that are loaded from it, and this "
            f"process runs as user {os.geteuid()}: set XDG_CACHE_HOME to a folder of your own"
        )
    return path


def private_folder(path: Path) -> Path:
    """Create a folder that this user alone can enter, or check that a folder is one. Raises ConfigError if others could
    have written files in it, and OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} has the mode {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}: another user "
            f"than {os.geteuid()} could have written files in it; remove it"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def _is_shared(folder: os.stat_result) -> bool:
    shared = stat.S_ISGID | stat.S_IWGRP
    is_group_alone = folder.st_mode & (shared | stat.S_IWOTH) == shared
    return is_group_alone and folder.st_gid in {os.getegid(), *os.getgroups()}
