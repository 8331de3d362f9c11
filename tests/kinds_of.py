"""The kinds of cache of an engine, for tests that look into one of them, and their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forebay.config.engine_config import KindConfig
from forebay.memory.kinds.kind import Kind
from forebay.memory.kinds.state.hybrid_rows import STATE
from forebay.memory.kinds.state.recurrent import States
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kinds.window.windows import Windows
from forebay.scheduler.memory.pools import Pools


def states_of(pools: Pools) -> Any:
    """None where no layer has a recurrent state."""
    return next((kind for kind in pools.kinds if isinstance(kind, States)), None)


def windows_of(pools: Pools) -> Any:
    """None where no layer has a window."""
    return next((kind for kind in pools.kinds if isinstance(kind, Windows)), None)


class CachedAlone(Kind):
    """A kind of which only the prefix cache keeps something."""

    def __init__(self, part: Any, *others: object) -> None:
        self.part, self.slots, self._others = part, part.slots, others

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.part, *self._others)

    def clear(self) -> None:
        self.part.clear()


def kind_config(*, num_slots: int = 0, num_window_pages: int = 0, window: int = 0, **others: Any) -> KindConfig:
    """State slots, and pages for windows of `window` tokens; 0 for a kind that no layer keeps."""
    return resized(KindConfig(**others), num_slots=num_slots, num_window_pages=num_window_pages, window=window)


def resized(config: KindConfig, **sizes: int) -> KindConfig:
    """Set those of `num_slots`, `num_window_pages` and `window` that are given."""
    slots, num_read = dict(config.num_slots), dict(config.num_read)
    for name, size in sizes.items():
        place = num_read if name == "window" else slots
        place[STATE if name == "num_slots" else WINDOW] = size
    return replace(config, num_slots=_present(slots), num_read=_present(num_read))


def num_states(config: KindConfig) -> int:
    return config.num_slots_of(STATE)


def num_window_pages(config: KindConfig) -> int:
    return config.num_slots_of(WINDOW)


def window_of(config: KindConfig) -> int:
    return config.num_read.get(WINDOW, 0)


def _present(sizes: dict[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in sizes.items() if size}
