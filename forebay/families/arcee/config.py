from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer


def parse(fields: Fields) -> ModelConfig:
    """Read Arcee's fields: Llama's, with another activation."""
    fields.only("hidden_act", "relu2")
    return ModelConfig(**transformer(fields, Defaults(kv_heads=True, rms_norm_eps=1e-5, mlp_bias=True)))


FAMILY: Final = Family(parse=parse)
