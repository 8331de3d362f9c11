"""The kinds of cache of an engine, for tests that look into one of them."""

from __future__ import annotations

from typing import Any

from forebay.memory.kinds.state.recurrent import States
from forebay.memory.kinds.window.windows import Windows
from forebay.scheduler.residency import Residencies


def states_of(held: Residencies) -> Any:
    """None where no layer has a recurrent state."""
    return next((kind for kind in held.kinds if isinstance(kind, States)), None)


def windows_of(held: Residencies) -> Any:
    """None where no layer has a window."""
    return next((kind for kind in held.kinds if isinstance(kind, Windows)), None)
