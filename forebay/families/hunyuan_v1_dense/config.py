from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.parts.rotated_first import SAID, rotated_first


def parse(fields: Fields) -> ModelConfig:
    """Read Hunyuan's fields."""
    return ModelConfig(**rotated_first(fields))


FAMILY: Final = Family(parse=parse, harmless=SAID)
