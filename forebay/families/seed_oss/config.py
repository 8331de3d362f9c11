from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.biases import sized


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedOssConfig(ModelConfig):
    """`attention_bias` is of q, k and v alone, `attention_out_bias` of attention's output."""

    attention_out_bias: bool


def parse(fields: Fields) -> SeedOssConfig:
    """Read Seed-OSS's fields: Llama's, with a bias of its own for attention's output."""
    values = transformer(fields, sized(fields, Defaults(head_dim=128, mlp_bias=True)))
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    return SeedOssConfig(**values, attention_out_bias=fields.flag("attention_out_bias", default=False))


FAMILY: Final = Family(parse=parse, harmless=frozenset({"residual_dropout"}))
