from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.transformer import Defaults, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedOssConfig(ModelConfig):
    """`attention_bias` is of q, k and v alone, `attention_out_bias` of attention's output."""

    attention_out_bias: bool


def parse(fields: Fields) -> SeedOssConfig:
    """Read Seed-OSS's fields: Llama's, with a bias of its own for attention's output."""
    values = transformer(fields, sized(fields, Defaults(head_dim=128, mlp_bias=True)))
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    return SeedOssConfig(**values, attention_out_bias=fields.flag("attention_out_bias", default=False))


def sized(fields: Fields, defaults: Defaults) -> Defaults:
    """Return the defaults of a type whose sizes of heads a null derives from other fields, instead of naming none."""
    head_dim = 0 if fields.is_null("head_dim") else defaults.head_dim
    return replace(defaults, head_dim=head_dim, kv_heads=fields.is_null("num_key_value_heads"))


FAMILY: Final = Family(parse=parse, harmless=frozenset({"residual_dropout"}))
