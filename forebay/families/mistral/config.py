from __future__ import annotations

from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.shape import WINDOW
from forebay.families.transformer import Defaults, Windows, transformer


def parse(fields: Fields) -> ModelConfig:
    return ModelConfig(**transformer(fields, Defaults(attention_bias=False), windows=Windows(listed=False)))


FAMILY: Final = Family(parse=parse, small=lambda shape: {"sliding_window": WINDOW})
