from __future__ import annotations

from typing import Final

from forebay.families.config.model_config import Family
from forebay.families.parts.joined_experts import NAMES
from forebay.families.parts.scaled_experts import parse, small

FAMILY: Final = Family(parse=parse, small=small, names=NAMES)
