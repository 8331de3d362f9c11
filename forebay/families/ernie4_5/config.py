from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer


def parse(fields: Fields) -> ModelConfig:
    """Read ERNIE 4.5's fields: `use_bias` holds for attention and MLP, and embeddings are tied by default."""
    defaults = Defaults(head_dim=128, kv_heads=True, rms_norm_eps=1e-5, rope_theta=500_000.0, tied=True)
    bias = fields.flag("use_bias", default=False)
    values = transformer(fields, defaults)
    values["attention_bias"] = values["mlp_bias"] = bias
    return ModelConfig(**values)


FAMILY: Final = Family(parse=parse)
