"""The file of a flight recorder: a header, the origin of its scheduler, and its records.

After `MAGIC` each part is its length in four bytes and its content. The header can be read for every version.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from forebay.base.errors import ConfigError
from forebay.base.package import __version__
from forebay.base.record_buffer import Content
from forebay.engine.recorder.hidden import Hidden
from forebay.engine.recorder.recorder import decode_all
from forebay.scheduler.journal import Origin, Record

MAGIC: Final = b"forebay flight recorder\n"
FORMAT: Final = 1
MOST_BYTES: Final = 1 << 32
_KEY_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file: its format, the program that wrote it, the model, and the reason. `time_s` is in seconds
    since 1970. Tokens are hashes unless `has_tokens`. Older records of `num_lost_bytes` were overwritten."""

    format: int = FORMAT
    version: str = __version__
    model: dict[str, Any] = {}
    reason: str = ""
    time_s: float = 0.0
    has_tokens: bool = False
    num_lost_bytes: int = 0


class Recording(NamedTuple):
    """A file that was read."""

    header: Header
    origin: Origin
    records: list[Record]


def write(path: Path, header: Header, content: Content) -> None:
    """Write a file that only its owner can read, without tokens unless `header.has_tokens`. Raises OSError, and
    msgspec.ValidationError for a buffer that holds something else."""
    origin = msgspec.msgpack.decode(content.first, type=Origin)
    records = decode_all(content.records)
    if not header.has_tokens:
        hidden = Hidden(origin, secrets.token_bytes(_KEY_BYTES))
        origin, records = hidden.origin, [*hidden.all(records)]
    encode = msgspec.msgpack.Encoder().encode
    parts = [encode(header), encode(origin), *map(encode, records)]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(MAGIC)
        for part in parts:
            file.write(_LENGTH.pack(len(part)) + part)


def read(path: Path) -> Recording:
    """Read a file. Raises ConfigError, with what is wrong, for one that cannot be read or was written by another
    version."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: larger than {MOST_BYTES >> 30} GiB, which no flight recorder writes")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path}: this is no file of a flight recorder")
    parts = [*_parts(path, data)]
    header = _header(path, parts[0] if parts else b"")
    if len(parts) < 2:
        raise ConfigError(f"{path}: it ends behind its header: it is truncated")
    try:
        origin = msgspec.msgpack.decode(parts[1], type=Origin)
        return Recording(header, origin, decode_all(parts[2:]))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it was altered: {str(error)[:200]}") from error


def _header(path: Path, data: bytes) -> Header:
    try:
        known = msgspec.msgpack.decode(data, type=dict[str, Any])
        version, number = str(known.get("version", ""))[:40], known.get("format")
        if number != FORMAT or version != __version__:
            raise ConfigError(
                f"{path}: written by forebay {version!a} in format {number!a:.40}; this is {__version__}, of format "
                f"{FORMAT}: replay it with that version"
            )
        return msgspec.convert(known, Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its header was altered: {str(error)[:200]}") from error


def _parts(path: Path, data: bytes) -> Iterator[bytes]:
    at, number = len(MAGIC), 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise ConfigError(f"{path}: it ends inside part {number}: it is truncated")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ConfigError(
                f"{path}: part {number} has {length} bytes, of which {len(data) - at} are there: it is truncated"
            )
        yield data[at : at + length]
        at, number = at + length, number + 1


def names(records: Sequence[Record]) -> dict[str, int]:
    """Return how many records of each kind there are."""
    found: dict[str, int] = {}
    for record in records:
        found[type(record).__name__] = found.get(type(record).__name__, 0) + 1
    return found
