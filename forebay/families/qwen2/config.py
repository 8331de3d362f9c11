from __future__ import annotations

from typing import Final

from forebay.families.config.transformer import Defaults, plain
from forebay.families.parts.late_windows import NO_WINDOW, late_windows

FAMILY: Final = plain(Defaults(attention_bias=False), windows=late_windows, harmless=NO_WINDOW)
