"""The ordered log of an engine with several ranks: its entries, their encoding, and the check of their order.

A record is a header and the entry as msgpack. The header has the number of the entry, from 0 on, the digest of all
entries before it, and the kind of the entry. Equal records therefore follow equal logs.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from forebay.base.errors import EngineError
from forebay.base.parts import I64, Part
from forebay.requests.step_plan import StepPlan

DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<Q{DIGEST_BYTES}sB")


class LogBroken(EngineError):
    """A record that does not continue the log of its reader."""

    default_code = "rank_log_broken"


class Capture(Part, frozen=True, kw_only=True):
    """Capture one more size of graphs, in idle time."""


class Void(Part, frozen=True, kw_only=True):
    """The step with that number failed on a rank: what it wrote counts for nothing."""

    step: int


class Keep(Part, frozen=True, kw_only=True):
    """Copy the caches' slots to host memory, by kind of cache, until `kv_cache` is resumed."""

    slots: dict[str, I64]


class Release(Part, frozen=True, kw_only=True):
    """Release the memory of these tags."""

    tags: tuple[str, ...]


class Resume(Part, frozen=True, kw_only=True):
    """Map the memory of these tags again."""

    tags: tuple[str, ...]


class Update(Part, frozen=True, kw_only=True):
    """Load the weights of another checkpoint of the same model."""

    path: str


Entry = StepPlan | Capture | Void | Keep | Release | Resume | Update
_KINDS: Final[tuple[type[Entry], ...]] = (StepPlan, Capture, Void, Keep, Release, Resume, Update)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}


class LogDigest:
    """The number of entries so far, and the digest of their records."""

    def __init__(self) -> None:
        self.num_entries, self.digest = 0, bytes(DIGEST_BYTES)

    def add(self, record: bytes) -> None:
        """Count a record. It has the digest of those before, so that its own digest is that of all."""
        self.num_entries += 1
        self.digest = xxhash.xxh3_128_digest(record)


class LogWriter:
    """Numbers entries and encodes them. One thread at a time may call it."""

    def __init__(self) -> None:
        self.written = LogDigest()

    def record(self, entry: Entry) -> bytes:
        """Return the record of the next entry."""
        header = _HEADER.pack(self.written.num_entries, self.written.digest, _NUMBERS[type(entry)])
        record = header + entry.encode()
        self.written.add(record)
        return record


class LogReader:
    """Decodes the records of one rank, in their order."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read = rank, LogDigest()

    def entry(self, record: bytes) -> Entry:
        """Return the entry of the next record. Raises LogBroken for a record that does not follow those read before,
        with both numbers or both digests, and for bytes that are no record."""
        if len(record) < _HEADER.size:
            raise LogBroken(f"rank {self.rank}: a log record of {len(record)} bytes, at least {_HEADER.size} expected")
        number, digest, kind = _HEADER.unpack_from(record)
        if number != self.read.num_entries:
            raise LogBroken(f"rank {self.rank}: log entry {number} arrived, entry {self.read.num_entries} expected")
        if digest != self.read.digest:
            raise LogBroken(
                f"rank {self.rank}: log entry {number} follows entries with the digest {digest.hex()}, those executed "
                f"here have {self.read.digest.hex()}"
            )
        if kind >= len(_KINDS):
            raise LogBroken(f"rank {self.rank}: log entry {number} has kind {kind}, the last one is {len(_KINDS) - 1}")
        try:
            entry: Entry = _KINDS[kind].decode(record[_HEADER.size :])
        except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError) as error:
            raise LogBroken(f"rank {self.rank}: log entry {number} cannot be decoded: {error}") from error
        self.read.add(record)
        return entry
