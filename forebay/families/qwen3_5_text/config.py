from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gated_delta import HARMLESS, NAMES, Qwen35Config, gated_transformer, small


def parse(fields: Fields) -> Qwen35Config:
    """Read Qwen3.5's fields: every fourth layer has attention by default, the others a gated delta rule."""
    return Qwen35Config(**gated_transformer(fields))


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
