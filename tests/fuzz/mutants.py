"""Seeded fuzzing (scorecard D-7): mutants of valid inputs, tried where nothing may compile, import, open or connect.

Every input follows from a seed and its number. A failure's note has both, and the seed is the test's parameter: running
that one test replays it.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, TypeVar

import pytest

from forebay.base.errors import ForebayError

T = TypeVar("T", bytes, str)

# What a parser of a stranger's bytes has no reason to do. Hooks cannot be taken off, so one is switched.
FORBIDDEN: Final = (
    *("exec", "compile", "open", "import", "marshal.", "pickle.", "ctypes.", "code.__new__", "os.", "subprocess."),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "shutil.", "tempfile.", "sys.settrace"),
)
MAX_SHOWN: Final = 2000  # characters of an input that fails
_NASTY_BYTES: Final = [
    b"\x00",
    b"\xff",
    b"\r\n",
    b"\n\n",
    b"\\",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"\xed\xa0\x80",
    b"\x80",
]
_NASTY_TEXT: Final = [
    *"\0\n\r\t\"'{}[]<>|%#\\",
    "{{",
    "}}",
    "{%",
    "%}",
    "\ud800",
    "\u2028",
    "\ufeff",
    "\U000f0000",
    "é",
    "🎉",
]
_watching: dict[int, list[str]] = {}  # by thread: those of earlier tests' servers may open and close what they like


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    seen = _watching.get(threading.get_ident()) if _watching else None
    if seen is not None and event.startswith(FORBIDDEN):
        seen.append(f"{event}{arguments!r}"[:200])


sys.addaudithook(_watch)


@contextmanager
def harmless() -> Iterator[None]:
    """Fails if this thread does anything in `FORBIDDEN` in here. Lazy imports are better done before.
    Garbage of earlier tests is not collected in here: its finalizers end processes and close files."""
    seen: list[str] = []
    collected = gc.isenabled()
    gc.disable()
    _watching[threading.get_ident()] = seen
    try:
        yield
    finally:
        del _watching[threading.get_ident()]
        if collected:
            gc.enable()
    assert not seen, f"hostile input came as far as {seen}"


def seeds(quick: int, long: int) -> list[Any]:
    """Parameters for `seed`: the first `quick` for every run of the suite, the others for the long tier."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, long))]


def fuzz(seed: int, count: int, make: Callable[[random.Random], Any], check: Callable[[Any], None]) -> None:
    """`check` on `count` inputs from `make`; a failure names the input. The first is tried twice: what is imported or
    compiled once in a process's life is then there."""
    rng = random.Random(seed)
    for number in range(count):
        case = make(rng)
        try:
            if number == 0:
                check(case)
            with harmless():
                check(case)
        except Exception as error:
            error.add_note(f"input {number} of seed {seed}: {case!r}"[:MAX_SHOWN])
            raise


def outcome(kind: type[ForebayError], call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or the error of that kind that it raises, if a client may read it. Any other goes on up."""
    try:
        return call(*arguments)
    except kind as error:
        told = error
    assert told.code
    assert 0 < len(told.message) < 1000
    return told


def mutated(rng: random.Random, corpus: Sequence[T]) -> T:
    """A member of `corpus` after up to six edits; now and then the member itself."""
    data = rng.choice(corpus)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 6])):
        data = _edited(rng, data, rng.choice(corpus))
    return data


def _edited(rng: random.Random, data: T, other: T) -> T:
    """One edit: cut, repeat, insert, swap or overwrite a piece, or cross over with `other`."""
    nasty: Sequence[T] = _NASTY_BYTES if isinstance(data, bytes) else _NASTY_TEXT
    start = rng.randint(0, len(data))
    stop = min(len(data), start + rng.choice([1, 1, 2, 4, 16, 64, 1 << 20]))
    before, piece, after = data[:start], data[start:stop], data[stop:]
    match rng.randrange(7):
        case 0:
            return before + after
        case 1:
            return (
                before + piece * rng.choice([2, 3, 40]) + after if len(piece) < 100 else before + piece + piece + after
            )
        case 2:
            return before + rng.choice(nasty) * rng.choice([1, 1, 2, 40]) + piece + after
        case 3:
            return before + rng.choice(nasty) + after
        case 4:
            return before + other[rng.randint(0, len(other)) :]
        case 5:
            return after + before
        case _:
            return _flipped(rng, data)


def _flipped(rng: random.Random, data: T) -> T:
    """One element replaced by a neighbour or by anything."""
    if not data:
        return data
    at = rng.randrange(len(data))
    if isinstance(data, str):
        return (
            data[:at] + chr(rng.choice([ord(data[at]) ^ 1, rng.randrange(0xD800), rng.randrange(128)])) + data[at + 1 :]
        )
    return data[:at] + bytes([rng.choice([data[at] ^ 1 << rng.randrange(8), rng.randrange(256)])]) + data[at + 1 :]


def pieces(rng: random.Random, data: T) -> list[T]:
    """`data`, cut anywhere: as it is, in a few parts, or one by one."""
    if rng.random() < 0.1:
        return [data[i : i + 1] for i in range(len(data))]
    cuts = [0, *sorted(rng.randint(0, len(data)) for _ in range(rng.randrange(6))), len(data)]
    return [data[start:stop] for start, stop in pairwise(cuts)]
