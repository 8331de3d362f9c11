"""Sliding windows on the device: pages of the last tokens."""

from __future__ import annotations

from typing import ClassVar, Final

from forebay.memory.kinds.window.windows import WINDOW
from forebay.runtime.kinds.kind import PagedKind


class SlidingWindows(PagedKind):
    """The field calls the page map `full_to_window`."""

    name: ClassVar[str] = WINDOW
    changed: ClassVar[tuple[str, str]] = ("map_pages", "map_windows")


DEVICE_KIND: Final = SlidingWindows
