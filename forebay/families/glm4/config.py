from __future__ import annotations

from typing import Final

from forebay.families.config.model_config import Family
from forebay.families.parts.partial_rotary import partly_rotary

FAMILY: Final = Family(parse=partly_rotary)
