"""The one way in which files of a model are opened: regular files only, and no more of one than its kind can need."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

from forebay.base.errors import ModelError
from forebay.base.units import human_bytes

# Twice and more of what published models have: 0.3 MB of configuration, 1.3 MB of tokenizer_config.json.
MAX_SMALL_BYTES: Final = 4 << 20
MAX_JSON_BYTES: Final = 64 << 20
_MAX_SMALL_VALUES: Final = 1 << 19  # of the 1.4 million empty lists that such a file has room for

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_there(path: Path) -> bool:
    """Return whether there is anything by this name, be it no file."""
    return os.path.exists(path)  # unlike Path.exists it raises nothing where the folder may not be looked into


def open_regular(path: Path) -> BinaryIO:
    """Open for reading; ModelError if there is no file of the name, or no regular one."""
    try:
        # Without waiting: a pipe that nobody writes to opens never. And what is open cannot be replaced any more.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}): check the path and that the download completed") from error
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    if kind != stat.S_IFREG:
        os.close(number)
        raise ModelError(f"{path}: cannot be read (it is {_KINDS.get(kind, 'no regular file')}, not a file)")
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """A whole file; ModelError for one of more than `most` bytes, of which nothing is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ModelError(f"{path}: it has {human_bytes(size)}; at most {human_bytes(most)} of such a file are read")
        try:
            data = file.read(size + 1)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
        if len(data) != size:
            raise ModelError(f"{path}: it has {size} bytes, and another number of them came: try again")
        return data


def read_text(path: Path) -> str:
    """Read a small file of text; ModelError if it is not UTF-8."""
    try:
        return read_bytes(path, MAX_SMALL_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: byte {error.start} is not UTF-8: save it as UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small file; ModelError for anything else."""
    return parse_json(read_bytes(path, MAX_SMALL_BYTES), str(path), most_values=_MAX_SMALL_VALUES)


def read_large_json(path: Path, *, most_values: int) -> dict[str, Any]:
    """As `read_json`, of a file that lists tokens or tensors."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), str(path), most_values=most_values)


def parse_json(text: bytes, where: str, *, most_values: int) -> dict[str, Any]:
    """Parse a JSON object of at most `most_values` values; raise ModelError, which starts with `where`, otherwise."""
    # Each value has a comma before it or is the first in its brackets: counted before any of them takes its 60 bytes.
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > most_values:
        raise ModelError(f"{where}: it has about {values} values; at most {most_values} of such a file are read")
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where}: a JSON object is expected, not {type(value).__name__}")
    return value
