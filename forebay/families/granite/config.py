from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.multipliers import GraniteConfig, multipliers, small_multipliers


def parse(fields: Fields) -> GraniteConfig:
    """Read Granite's fields: Llama's, and four multipliers."""
    values = transformer(fields, Defaults(kv_heads=True, mlp_bias=True))
    return GraniteConfig(**values, multipliers=multipliers(fields))


FAMILY: Final = Family(parse=parse, small=small_multipliers)
