"""Named places at which a test can make production code fail.

`fault.point("engine.plan")` costs one dictionary look-up while nothing is armed. Points are armed from code, or in a
child process through FOREBAY_FAULTS ("name=kind@k,..."), which is refused unless FOREBAY_TEST_FAULTS=1 is set too.
"""

from __future__ import annotations

import os
import signal

from forebay.base.errors import ConfigError

FAULT_VARIABLES = ("FOREBAY_FAULTS", "FOREBAY_TEST_FAULTS")

_KINDS: dict[str, type[BaseException]] = {"memory": MemoryError, "runtime": RuntimeError, "os": OSError}
_armed: dict[str, tuple[str, int]] = {}
_hits: dict[str, int] = {}


def arm(name: str, kind: str = "runtime", at: int = 1) -> None:
    """From the `at`-th passage on, `point(name)` raises (`kind` memory, runtime, os) or kills the process (`kill`)."""
    if kind != "kill" and kind not in _KINDS:
        raise ConfigError(f"fault kind {kind!r}: use kill, {', '.join(_KINDS)}")
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
    return bool(_armed or os.environ.get("FOREBAY_FAULTS"))


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
    text = os.environ.get("FOREBAY_FAULTS", "")
    if not text:
        return
    if os.environ.get("FOREBAY_TEST_FAULTS") != "1":
        raise ConfigError("FOREBAY_FAULTS is set but FOREBAY_TEST_FAULTS=1 is not: faults are for tests only")
    for item in text.split(","):
        name, _, rest = item.partition("=")
        kind, _, at = rest.partition("@")
        arm(name, kind or "runtime", int(at or 1))
