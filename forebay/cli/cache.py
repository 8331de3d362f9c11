"""`forebay cache list|verify|rm DIR`: the files of a prefix cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from forebay.base.errors import ConfigError, ModelError
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser
from forebay.formats import prefix_files
from forebay.formats.prefix_files import CutShort, Record, Segment, Unreadable
from forebay.memory.kv_allocator import KV

_TOKEN_BYTES: Final = 4


def run(words: Sequence[str]) -> int:
    """Dispatch to the action named by the first word."""
    action = words[0] if words else ""
    if action in ("-h", "--help"):
        lines = [f"  {name:<8} {summary}" for name, (summary, _) in ACTIONS.items()]
        print("\n".join(["usage: forebay cache ACTION DIR", "", *lines]))
        raise SystemExit(0)
    if action not in ACTIONS:
        raise ConfigError(f"there is no `forebay cache {action}`: use {', '.join(ACTIONS)}, and a folder")
    summary, act = ACTIONS[action]
    parser = Parser(f"cache {action}", f"{summary.capitalize()}.", "DIR")
    parser.option("folder", nargs="?", help="the folder of --prefix-cache-dir")
    folder = Path(parser.parse(words[1:]).own.folder or "")
    if not folder.name or not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder: name that of --prefix-cache-dir")
    return act(folder)


def _segments(folder: Path, unusable: list[Path]) -> Iterator[tuple[Path, Segment, dict[str, str]]]:
    """Yield the segments that can be opened; print a line for each of the others, and add those to `unusable` that no
    killed writer explains."""
    for path in prefix_files.paths(folder):
        try:
            segment, identity = prefix_files.open_segment(path)
        except Unreadable as error:
            print(f"{path.name}  unusable: {error}")
            if not isinstance(error, CutShort):
                unusable.append(path)
            continue
        try:
            yield path, segment, identity
        finally:
            os.close(segment.descriptor)


def _list(folder: Path) -> int:
    total = 0
    for path, segment, identity in _segments(folder, []):
        records = [record for _, record in segment.records() if not record.drops]
        tokens = sum(map(_num_tokens, records))
        of = (
            f"weights {identity.get('weights', '?')[:12]}, {identity.get('kernels', '?')}, {identity.get('dtype', '?')}"
        )
        print(f"{path.name}  {human_bytes(segment.num_bytes)}  {len(records)} records, KV of {tokens} tokens  {of}")
        total += segment.num_bytes
    print(f"{human_bytes(total)} in {folder}")
    return 0


def _num_tokens(record: Record) -> int:
    """Return the number of tokens whose KV a record has: the records before it have what is in front of its pages."""
    num_pages = len(record.kinds[KV].ends)
    return len(record.tokens) // _TOKEN_BYTES * num_pages // (record.start + num_pages)


def _verify(folder: Path) -> int:
    unusable, num_rows, num_damaged = list[Path](), 0, 0
    for path, segment, _ in _segments(folder, unusable):
        end = segment.first
        for begin, record in segment.records():
            end = begin + record.num_bytes
            rows, damaged = _rows_of(path, segment, begin, record)
            num_rows, num_damaged = num_rows + rows, num_damaged + damaged
        if segment.ended is not None:
            print(f"{path.name}  {human_bytes(segment.num_bytes - end)} are not used: {segment.ended}")
            if not isinstance(segment.ended, CutShort):
                unusable.append(path)
    print(f"{num_rows} rows, {num_damaged} damaged" + (f"; {len(unusable)} segments damaged" if unusable else ""))
    return 1 if num_damaged or unusable else 0


def _rows_of(path: Path, segment: Segment, begin: int, record: Record) -> tuple[int, int]:
    """Return the number of rows of a record, and of those that differ from their checksums; print a line for each."""
    data = memoryview(bytearray(record.num_bytes))
    segment.read(begin, record.num_bytes, data)
    num_rows = num_damaged = 0
    for kind, number, at, checksum in record.places:
        num_rows += 1
        if xxhash.xxh3_64_intdigest(data[at : at + record.kinds[kind].row_bytes]) != checksum:
            num_damaged += 1
            print(f"{path.name}  row {number} of {kind} at byte {begin + at} is damaged")
    return num_rows, num_damaged


def _rm(folder: Path) -> int:
    lock = prefix_files.lock(folder)
    if lock is None:
        raise ModelError(f"a server writes {folder}: stop it first")
    try:
        paths = prefix_files.paths(folder)
        size = sum(path.stat().st_size for path in paths)
        for path in paths:
            path.unlink()
        print(f"removed {len(paths)} files, {human_bytes(size)}")
    finally:
        os.close(lock)
    return 0


ACTIONS: Final[dict[str, tuple[str, Callable[[Path], int]]]] = {
    "list": ("print the segments of a folder, with the model that each is of", _list),
    "verify": ("read all segments and compare each row with its checksum", _verify),
    "rm": ("remove all segments", _rm),
}
