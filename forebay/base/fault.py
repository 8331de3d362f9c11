"""Named places at which a test can make production code fail.

`fault.point("engine.plan")` costs one dictionary look-up while nothing is armed. Points are armed from code, or in a
child process through FOREBAY_FAULTS ("name=kind@k,..."), which is refused unless FOREBAY_TEST_FAULTS=1 is set too.
Faults of the kind `plant` do not fail: `engine/loop/planted.py` plants them in an engine process before it is built.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from forebay.base.errors import ConfigError

FAULTS: Final = "FOREBAY_FAULTS"
ALLOWED: Final = "FOREBAY_TEST_FAULTS"
FAULT_VARIABLES: Final = (FAULTS, ALLOWED)

PLANT: Final = "plant"
_KINDS: dict[str, type[BaseException]] = {"memory": MemoryError, "runtime": RuntimeError, "os": OSError}


class Planted(NamedTuple):
    """A method of a class, and the faulty one in its place."""

    owner: type
    name: str
    faulty: Callable[..., Any]


_armed: dict[str, tuple[str, int]] = {}
_hits: dict[str, int] = {}


def arm(name: str, kind: str = "runtime", at: int = 1) -> None:
    """From the `at`-th passage on, `point(name)` raises (`kind` memory, runtime, os) or kills the process (`kill`).
    Faults of the kind `plant` are planted by their names."""
    if kind not in ("kill", PLANT, *_KINDS):
        raise ConfigError(f"fault kind {kind!r}: use kill, {PLANT}, {', '.join(_KINDS)}")
    _armed[name] = (kind, at)
    _hits[name] = 0


def disarm(name: str | None = None) -> None:
    """Disarm one fault, or all of them without a name."""
    if name is None:
        _armed.clear()
    else:
        _armed.pop(name, None)


def is_armed() -> bool:
    """Return whether a point is armed here, or the environment would arm one in an engine started from here."""
    return bool(_armed or os.environ.get(FAULTS))


def planted() -> list[str]:
    """Return the names of the faults to plant in this process."""
    return [name for name, (kind, _) in _armed.items() if kind == PLANT]


@contextmanager
def plants(name: str) -> Iterator[None]:
    """Arm the fault to plant in the processes that are started inside the block."""
    values = {FAULTS: f"{name}={PLANT}", ALLOWED: "1"}
    before = {variable: os.environ.get(variable) for variable in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def point(name: str) -> None:
    """Raise or kill here if a test has armed the fault `name`; otherwise one dictionary lookup."""
    if name in _armed:
        _trip(name)


def _trip(name: str) -> None:
    kind, at = _armed[name]
    _hits[name] += 1
    if _hits[name] != at:
        return
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise _KINDS[kind](f"injected fault at {name}")


def arm_from_environment() -> None:
    """Arm the faults of `FOREBAY_FAULTS` ("name=kind@count", comma-separated); raise ConfigError outside tests."""
    text = os.environ.get(FAULTS, "")
    if not text:
        return
    if os.environ.get(ALLOWED) != "1":
        raise ConfigError("FOREBAY_FAULTS is set but FOREBAY_TEST_FAULTS=1 is not: faults are for tests only")
    for item in text.split(","):
        name, _, fault = item.partition("=")
        kind, _, at = fault.partition("@")
        arm(name, kind or "runtime", int(at or 1))
