"""Rotary embeddings of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.families.base.fields import Fields
from forebay.families.base.rope import rotary_dim, without_partial_rotary
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import Defaults, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialRotaryConfig(ModelConfig):
    """`rotary_dim`: how many dimensions of a head, the first ones, are rotated."""

    rotary_dim: int


def partly_rotary(fields: Fields) -> PartialRotaryConfig:
    """Read the fields of GLM-4's two types: half of each head is rotated by default, and queries, keys and values have
    a bias."""
    share, whole = without_partial_rotary(fields, default=0.5)
    values = transformer(whole, Defaults(head_dim=128, rms_norm_eps=1.5625e-7))
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    return PartialRotaryConfig(**values, rotary_dim=rotary_dim(fields, values["head_dim"], share))
