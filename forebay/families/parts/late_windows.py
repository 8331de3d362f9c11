"""Windows in the last layers, which some files only ask for, as Qwen 2 has them."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.transformer import Windows

# Of a window that is not asked for.
NO_WINDOW: Final = frozenset({"sliding_window", "max_window_layers"})


def asks_for_windows(fields: Fields) -> bool:
    """Return whether the file turns windows on: sizes alone do not."""
    return fields.flag("use_sliding_window", default=False)


def late_windows(fields: Fields) -> Windows | None:
    """Return the windows of the layers from `max_window_layers` on, or None if they are off."""

    def late(num_layers: int) -> range:
        return range(fields.size("max_window_layers", default=28), num_layers)

    return Windows(layers=late) if asks_for_windows(fields) else None
