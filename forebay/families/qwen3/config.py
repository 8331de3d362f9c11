from __future__ import annotations

from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.qwen2.config import NO_WINDOW, late_windows
from forebay.families.transformer import Defaults, transformer


def parse(fields: Fields) -> ModelConfig:
    return ModelConfig(**transformer(fields, Defaults(head_dim=128), windows=late_windows(fields)))


FAMILY: Final = Family(parse=parse, harmless=NO_WINDOW)
