"""State rings on the device: the layers' input is that of full KV, whose rows are the rings."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from forebay.memory.kinds.ring.rings import RING
from forebay.ops.reference.attention import PagedKv
from forebay.runtime.kinds.kind import DeviceKind


class StateRings(DeviceKind):
    """Rings of request rows: nothing changes before a step."""

    name: ClassVar[str] = RING

    def layer_input(self, full: PagedKv, inputs: Any) -> PagedKv:
        return full


DEVICE_KIND: Final = StateRings
