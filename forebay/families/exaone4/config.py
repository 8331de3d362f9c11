from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.parts.windows import small, windowed_transformer


def parse(fields: Fields) -> ModelConfig:
    """Read EXAONE 4's fields."""
    return ModelConfig(**windowed_transformer(fields))


FAMILY: Final = Family(parse=parse, small=small)
