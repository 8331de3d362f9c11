from __future__ import annotations

from typing import Final

from forebay.families.shape import WINDOW
from forebay.families.transformer import Defaults, Windows, plain

FAMILY: Final = plain(
    Defaults(attention_bias=False),
    windows=lambda fields: Windows(listed=False),
    small=lambda shape: {"sliding_window": WINDOW},
)
