"""Sliding windows on the device: pages of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import Tensor

from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.runtime.kinds.kind import DeviceKind, PageMap


class SlidingWindows(DeviceKind):
    """The field calls the page map `full_to_window`."""

    name: ClassVar[str] = WINDOW

    def __init__(self, cache: CachePool, ops: Ops, counts: Tensor) -> None:
        super().__init__(cache, ops, counts)
        self._map = PageMap(cache, ops, WINDOW, pages="map_pages", entries="map_windows")

    def change(self, columns: Mapping[str, Tensor]) -> None:
        self._map.change(columns)

    def layer_input(self, full: PagedKv, inputs: Any) -> PagedKv:
        return self._map.paged(full)


DEVICE_KIND: Final = SlidingWindows
