"""The weights cache: files of packed weights, so that a second start need not compute them from the checkpoint.

A file begins with a fixed part: magic, digest and length of the header. The header in JSON and zeros up to a page
follow, then the pieces in the order in which the loader packs them, each on a cache line. The header has the key
(everything that the bytes depend on), and the size and checksum of each piece.

A file never changes once it has its name. A process that maps it keeps its bytes after it was replaced or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from forebay.base import fault
from forebay.base.errors import ModelError
from forebay.base.trust import has_trusted_writers
from forebay.base.units import human_bytes

LINE: Final = 64  # bytes: pieces begin on one
SUFFIX: Final = ".weights"
SCRATCH: Final = ".writing-"  # how names begin of what is removed if no process has it locked
_MAGIC: Final = b"forebay-weights1"
_FIXED: Final = struct.Struct("<16s16sQ")  # magic, digest of the header, its bytes
_PAGE: Final = 4096
# Of an 80B model with 512 experts in 48 layers it has 3 MB.
_MAX_HEADER_BYTES: Final = 256 << 20
ABANDONED_S: Final = 60.0  # since a file without a lock was last written to
_READ_BYTES: Final = 1 << 20  # hashed in 0.1 ms, for which other threads may have to wait
_WRITE_BYTES: Final = 16 << 20  # between two reports of progress

Key = Mapping[str, str]
"""Everything that the bytes depend on, in words."""

Progress = Callable[[int, int], None]


class Unusable(ModelError):
    """A file of the cache that cannot be used; the message states why."""


class Header(msgspec.Struct, frozen=True):
    """The pieces of a file: bytes and checksum of each, in order."""

    key: dict[str, str]
    sizes: list[int]
    sums: list[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces, each up to the line on which the next begins."""
        return sum(map(_lines, self.sizes))


@dataclass(frozen=True, slots=True)
class CacheFile:
    """An open file whose header was checked. `descriptor` belongs to the caller of `open_cached`."""

    descriptor: int
    header: Header
    first: int  # byte of the first piece

    @property
    def num_bytes(self) -> int:
        return self.first + self.header.num_bytes

    def spans(self) -> Iterator[slice]:
        """Yield the bytes of each piece, counted from the beginning of the file."""
        begin = self.first
        for size in self.header.sizes:
            yield slice(begin, begin + size)
            begin += _lines(size)

    def duplicate(self) -> CacheFile:
        """Return the same file with a descriptor of its own, which the caller closes."""
        return replace(self, descriptor=os.dup(self.descriptor))

    def check_on_disk(self) -> None:
        """Read the file in blocks, and compare it with the checksums of its header. Raises Unusable for the first piece
        that differs, and OSError."""
        for number, (span, expected) in enumerate(zip(self.spans(), self.header.sums, strict=True)):
            digest = xxhash.xxh3_64()
            for first in range(span.start, span.stop, _READ_BYTES):
                digest.update(os.pread(self.descriptor, min(_READ_BYTES, span.stop - first), first))
            if digest.intdigest() != expected:
                raise Unusable(f"piece {number} of {len(self.header.sums)} is damaged: its checksum differs")

    def check_contents(self, memory: memoryview) -> None:
        """Compare the mapped file with the checksums of its header. Raises Unusable for the first that differs."""
        for number, (span, expected) in enumerate(zip(self.spans(), self.header.sums, strict=True)):
            if xxhash.xxh3_64_intdigest(memory[span]) != expected:
                raise Unusable(f"piece {number} of {len(self.header.sums)} is damaged: its checksum differs")


def path_of(folder: Path, key: Key) -> Path:
    """Return the path of the file with this key, whether or not it exists."""
    return folder / (hashlib.blake2b(_encoded(key), digest_size=16).hexdigest() + SUFFIX)


def inode_of(folder: Path, key: Key) -> int:
    """Return the inode of the file with this key, which another file does not have while it is there; 0 if there is
    none."""
    try:
        return path_of(folder, key).stat().st_ino
    except OSError:
        return 0


def open_cached(folder: Path, key: Key) -> CacheFile | None:
    """Open the file with this key and mark it as used; None if there is none. Raises Unusable for one that is damaged,
    of another key, or that another user could have written."""
    path = path_of(folder, key)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"it cannot be opened ({error})") from error
    try:
        found = _checked(descriptor, path, key)
        with contextlib.suppress(OSError):  # a folder may be read-only
            os.utime(path)
    except BaseException:
        os.close(descriptor)
        raise
    return found


def _checked(descriptor: int, path: Path, key: Key) -> CacheFile:
    status, folder = os.fstat(descriptor), path.parent.stat()
    if not has_trusted_writers(status, folder):
        raise Unusable(f"user {status.st_uid} owns it with mode {status.st_mode & 0o777:o}: another could write it")
    try:
        fixed = os.pread(descriptor, _FIXED.size, 0)
    except OSError as error:
        raise Unusable(f"it cannot be read ({error})") from error
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise Unusable("it does not begin as a weights cache")
    header, length = _read_header(descriptor, fixed, status)
    if header.key != dict(key):
        differ = sorted(name for name in {*header.key, *key} if header.key.get(name) != key.get(name))
        raise Unusable(f"it was written for others: {', '.join(differ)} differ")
    file = CacheFile(descriptor, header, _first(length))
    if file.num_bytes != status.st_size or len(header.sums) != len(header.sizes) or min(header.sizes, default=0) < 0:
        raise Unusable(f"it has {status.st_size} bytes and {len(header.sums)} checksums, not what its header names")
    return file


def _read_header(descriptor: int, fixed: bytes, status: os.stat_result) -> tuple[Header, int]:
    """Return the header behind the `fixed` beginning of a file, and its length in bytes. Raises Unusable."""
    _, digest, length = _FIXED.unpack(fixed)
    if length > min(_MAX_HEADER_BYTES, status.st_size):
        raise Unusable(f"its header would have {length} bytes, the file has {status.st_size}")
    text = os.pread(descriptor, length, _FIXED.size)
    if _digest(text) != digest:
        raise Unusable("its header is damaged: the digest differs")
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise Unusable(f"its header is damaged: {error}") from error
    return header, length


def write(folder: Path, key: Key, pieces: Sequence[memoryview], *, limit_bytes: int, progress: Progress) -> Path:
    """Write the pieces, each flat bytes, as the file with this key; return its path. It appears whole or not at all.

    First removes least recently used files, so that all together have at most `limit_bytes`. Safe in several processes
    at once: the last rename wins, with equal content. Raises Unusable if the pieces alone exceed the limit, OSError if
    the disk is full.
    """
    sums = [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
    header = Header(dict(key), [len(piece) for piece in pieces], sums)
    text = msgspec.json.encode(header)
    total, target = _first(len(text)) + header.num_bytes, path_of(folder, key)
    if total > limit_bytes:
        raise Unusable(f"they take {human_bytes(total)} and --weights-cache-bytes allows {human_bytes(limit_bytes)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_room(folder, target, limit_bytes - total)
    scratch = folder / f"{SCRATCH}{target.stem}-{os.getpid()}"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = (_FIXED.pack(_MAGIC, _digest(text), len(text)) + text).ljust(_first(len(text)), b"\0")
        done = _write_all(descriptor, memoryview(begin))
        for piece in pieces:
            for first in range(0, len(piece), _WRITE_BYTES):
                done += _write_all(descriptor, piece[first : first + _WRITE_BYTES])
                fault.point("weights_cache.write")
                progress(done, total)
            done += _write_all(descriptor, memoryview(bytes(_lines(len(piece)) - len(piece))))
        os.fsync(descriptor)
        os.replace(scratch, target)
        _sync_folder(folder)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return target


def _make_room(folder: Path, target: Path, limit_bytes: int) -> None:
    """Remove what writers that were killed have left, then the least recently used files until those other than
    `target` have at most `limit_bytes`."""
    for path in folder.glob(f"{SCRATCH}*"):
        if _is_abandoned(path):
            path.unlink(missing_ok=True)
    used: list[tuple[int, int, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            used.append((status.st_mtime_ns, status.st_size, path))
    kept = sum(size for _, size, path in used if path != target)
    for _, size, path in sorted(used):
        if kept > limit_bytes and path != target:
            path.unlink(missing_ok=True)
            kept -= size


def _is_abandoned(path: Path) -> bool:
    """Return whether no process writes the file: it has no lock, and is old enough for its writer to have one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
    return done


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encoded(key: Key) -> bytes:
    return msgspec.json.encode(dict(sorted(key.items())))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _first(header_bytes: int) -> int:
    return -(-(_FIXED.size + header_bytes) // _PAGE) * _PAGE


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
