from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.biases import sized

_BIASES: Final = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


def parse(fields: Fields) -> ModelConfig:
    """Read InternLM 3's fields. Raises ModelError for a bias of some layers alone, as transformers does."""
    fields = fields.renamed(_BIASES)
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, mlp_bias=True)
    values = transformer(fields, sized(fields, defaults))
    if values["attention_bias"] != values["mlp_bias"]:
        raise fields.wrong("qkv_bias", "as bias: all layers have one, or none has")
    return ModelConfig(**values)


FAMILY: Final = Family(parse=parse)
