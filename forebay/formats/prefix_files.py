"""The files of the prefix cache: segments of records, appended by one process and read by any number.

A segment begins with its identity: everything that the bytes of its records depend on. A record has the tokens of a
prefix and rows of the cache for a part of it: a header with a checksum of each row, and the rows behind it. What
follows the last whole record of a segment is ignored, so that a writer that is killed loses only what it was writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from forebay.base import fault
from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.base.trust import has_trusted_writers

SEGMENT_BYTES: Final = 64 << 20
SUFFIX: Final = ".prefixes"
SECRET: Final = "secret"
LOCK: Final = "lock"
SECRET_BYTES: Final = 32
_MAGIC: Final = b"forebay-prefix-1"
_RECORD: Final = b"rec1"
_FIXED: Final = struct.Struct("<16sQQ")  # magic, bytes and checksum of the identity
_HEADER: Final = struct.Struct("<4sIQQ")  # magic, bytes of the header, of the rows, checksum of the header
_MAX_HEADER_BYTES: Final = 64 << 20

log = get_logger("prefix-files")

Identity = Mapping[str, str]
"""Everything that rows depend on, in words."""


class Unreadable(Exception):
    """A file of the cache, or a part of it, cannot be used; the message states why."""


class CutShort(Unreadable):
    """A file ends inside of a part, as a writer leaves it that is killed."""


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one kind of cache in a record: `ends` as of a tree's slots, the bytes of a row, and its checksums."""

    ends: list[int]
    row_bytes: int
    sums: list[int]


class RecordedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture of a record's prefix: its tokens have the ids from `first_id` on, which only the process that wrote the
    record gives to it. `digest`, `grid` and `sizes` are those of `requests.pictures.Picture`."""

    first_id: int
    digest: bytes
    grid: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Rows of the pages of a prefix from number `start` on, by kind of cache, and of what is read in front of them.
    `tokens` are those of the whole prefix, int32. Without any kind the page with number `start`, the last one of the
    prefix, is dropped from the records before, with all that is behind it."""

    namespace: str
    tenant: str
    tokens: bytes
    start: int
    kinds: dict[str, Rows]
    pictures: list[RecordedPicture] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(rows.sums) * rows.row_bytes for rows in self.kinds.values())

    @property
    def drops(self) -> bool:
        """Whether the record drops what others have."""
        return not self.kinds

    def covers(self, other: Record) -> bool:
        """Return whether another record has the whole prefix of this one."""
        return other.namespace == self.namespace and other.tokens.startswith(self.tokens)

    @property
    def places(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield kind, number, place in the record and checksum of each row."""
        at = 0
        for kind, rows in self.kinds.items():
            for number, checksum in enumerate(rows.sums):
                yield kind, number, at, checksum
                at += rows.row_bytes


@dataclass(eq=False, slots=True)
class Segment:
    """An open file. Its descriptor stays open, so that rows can be read after the file was removed. `ended` is why
    `records` ended in front of the end of the file."""

    path: Path
    descriptor: int
    num_bytes: int
    first: int = 0  # byte of the first record
    ended: Unreadable | None = None

    def read(self, offset: int, num_bytes: int, into: memoryview) -> None:
        """Read bytes into memory. Raises Unreadable for a file that is shorter, or a disk that fails."""
        done = 0
        while done < num_bytes:
            try:
                count = os.preadv(self.descriptor, [into[done:num_bytes]], offset + done)
            except OSError as error:
                raise Unreadable(f"{self.path.name} cannot be read ({error.strerror})") from error
            if not count:
                raise Unreadable(f"{self.path.name} ends at byte {offset + done}")
            done += count

    def records(self) -> Iterator[tuple[int, Record]]:
        """Yield each whole record, with the place of its rows, up to the first damaged one."""
        self.ended, first = None, self.first
        try:
            while first < self.num_bytes:
                begin, record = self._record(first)
                yield begin, record
                first = begin + record.num_bytes
        except Unreadable as error:
            self.ended = error

    def _record(self, first: int) -> tuple[int, Record]:
        fixed = _bytes_at(self.descriptor, self.path, _HEADER.size, first)
        magic, header_bytes, row_bytes, checksum = _HEADER.unpack(fixed)
        damaged = Unreadable(f"the record at byte {first} of {self.path.name} is damaged")
        if magic != _RECORD or header_bytes > _MAX_HEADER_BYTES:
            raise damaged
        begin = first + _HEADER.size + header_bytes
        header = _bytes_at(self.descriptor, self.path, header_bytes, first + _HEADER.size)
        if xxhash.xxh3_64_intdigest(header) != checksum:
            raise damaged
        try:
            record = msgspec.msgpack.decode(header, type=Record)
        except msgspec.MsgspecError as error:
            raise damaged from error
        if record.num_bytes != row_bytes:
            raise damaged
        if begin + row_bytes > self.num_bytes:
            raise CutShort(f"{self.path.name} ends inside of the record at byte {first}")
        return begin, record


def _bytes_at(descriptor: int, path: Path, num_bytes: int, offset: int) -> bytes:
    """Return bytes of a file. Raises Unreadable for a disk that fails, and CutShort."""
    try:
        found = os.pread(descriptor, num_bytes, offset)
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read ({error.strerror})") from error
    if len(found) < num_bytes:
        raise CutShort(f"{path.name} ends inside of what begins at byte {offset}")
    return found


def paths(folder: Path) -> list[Path]:
    """Return the segments of a folder, the oldest first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (len(path.name), path.name))


def open_segment(path: Path) -> tuple[Segment, dict[str, str]]:
    """Open a segment, and return its identity beside it. Raises Unreadable for a file that is damaged, or
    that another user could have written, and CutShort."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{path.name} is no file")
        if not has_trusted_writers(status, path.parent.stat()):
            mode = stat.S_IMODE(status.st_mode)
            raise Unreadable(f"user {status.st_uid} owns {path.name} with mode {mode:o}: another could write it")
        identity, first = _identity(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return Segment(path, descriptor, status.st_size, first), identity


def _identity(descriptor: int, path: Path) -> tuple[dict[str, str], int]:
    magic, length, checksum = _FIXED.unpack(_bytes_at(descriptor, path, _FIXED.size, 0))
    if magic != _MAGIC:
        raise Unreadable(f"{path.name} does not begin as a segment of this version")
    damaged = Unreadable(f"the identity of {path.name} is damaged: its checksum differs")
    if length > _MAX_HEADER_BYTES:
        raise damaged
    text = _bytes_at(descriptor, path, length, _FIXED.size)
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise damaged
    return msgspec.msgpack.decode(text, type=dict[str, str]), _FIXED.size + length


def difference(found: Identity, ours: Identity) -> str:
    """Return the first part in which two identities differ, with both values; "" if they are equal."""
    for name in sorted({*found, *ours}):
        if found.get(name) != ours.get(name):
            return f"{name}: the file has {found.get(name)!r}, this engine {ours.get(name)!r}"
    return ""


class Writer:
    """Appends records to segments of one identity. For one thread."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder, self._identity = folder, dict(identity)
        self._number = max((int(path.stem) for path in paths(folder) if path.stem.isdecimal()), default=0)
        self._open: _Open | None = None

    @property
    def segment(self) -> Segment | None:
        """The segment that is being written."""
        return None if self._open is None else self._open.segment

    def append(self, record: Record, rows: Sequence[memoryview]) -> tuple[Segment, int]:
        """Write a record; its segment, and the place of its rows there. Raises OSError, as for a full disk."""
        header = msgspec.msgpack.encode(record)
        fixed = _HEADER.pack(_RECORD, len(header), record.num_bytes, xxhash.xxh3_64_intdigest(header))
        into = self._open
        if into is None or into.segment.num_bytes >= SEGMENT_BYTES:
            into = self._begin()
        begin = into.segment.num_bytes + len(fixed) + len(header)
        for part in (memoryview(fixed + header), *rows):
            into.write(part)
        return into.segment, begin

    def _begin(self) -> _Open:
        self.close()
        self._number += 1
        path = self._folder / f"{self._number:06}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open = begun = _Open(file, Segment(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0))
        text = msgspec.msgpack.encode(self._identity)
        begun.write(memoryview(_FIXED.pack(_MAGIC, len(text), xxhash.xxh3_64_intdigest(text)) + text))
        begun.segment.first = begun.segment.num_bytes
        return begun

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        if self._open is not None:
            os.fsync(self._open.file)

    def close(self) -> None:
        """End the segment that is being written."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._open.file)
            os.close(self._open.file)
            self._open = None


class _Open(NamedTuple):
    """A segment that is being written, with the descriptor for that."""

    file: int
    segment: Segment

    def write(self, data: memoryview) -> None:
        """Append all of the data. Raises OSError."""
        done = 0
        while done < len(data):
            fault.point("prefix_files.write")
            done += os.write(self.file, data[done:])
        self.segment.num_bytes += len(data)


def prepare(folder: Path) -> None:
    """Create a folder that this user alone can enter, or check that it is one. Raises ConfigError, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if not has_trusted_writers(status, status):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"user {status.st_uid} owns {folder}, mode {mode:o}: another user could write files in it")


def folder_secret(folder: Path) -> bytes:
    """Return the secret by which the namespaces of a folder are made, which is created with the folder. Raises
    ConfigError for a secret that others can read or write, or that is no secret, and OSError."""
    prepare(folder)
    path = folder / SECRET
    if not os.path.lexists(path):
        if paths(folder):
            log.warning(event("prefix_cache_secret_missing", path=path, effect="files of keys and users are not found"))
        _make_secret(path)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = stat.filemode(status.st_mode)
        raise ConfigError(f"{path} has mode {mode} and owner {status.st_uid}: others could read it; remove the folder")
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} has {len(secret)} bytes, not {SECRET_BYTES}: remove the folder")
    return secret


def _make_secret(path: Path) -> None:
    """Make a secret whole or not at all, whichever process is first."""
    made = path.with_name(f"{SECRET}.{secrets.token_hex(8)}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _Open(descriptor, Segment(made, -1, 0)).write(memoryview(secrets.token_bytes(SECRET_BYTES)))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.close(descriptor)
        made.unlink()


def usable_secret(folder: str) -> bytes | None:
    """Return the secret of a folder; None for no folder, and if there is none to use: then the engine logs why, and
    uses no files."""
    if not folder:
        return None
    try:
        return folder_secret(Path(folder))
    except (ConfigError, OSError):
        return None


def writer_of(folder: Path) -> str:
    """Return which process writes a folder, and since when, as its lock says."""
    try:
        pid, began = (folder / LOCK).read_text().split()
    except (OSError, ValueError):
        return "another process"
    return f"process {pid[:20]}, which started {began[:20]} ticks after the machine,"


def lock(folder: Path) -> int | None:
    """Become the one writer of a folder; the descriptor that keeps the lock, None if another process has it. The system
    gives the lock back with the process. Its file names the process, with its start time, since numbers are used again.
    Raises OSError."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {_start_ticks()}\n".encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _start_ticks() -> str:
    """Return when this process started, in clock ticks after the machine; "?" elsewhere than on Linux."""
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "?"
