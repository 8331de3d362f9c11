from __future__ import annotations

from typing import Final

from forebay.families.base.shape import WINDOW
from forebay.families.config.transformer import Defaults, Windows, plain

FAMILY: Final = plain(
    Defaults(attention_bias=False),
    windows=lambda fields: Windows(listed=False),
    small=lambda shape: {"sliding_window": WINDOW},
)
