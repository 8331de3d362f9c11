"""GTE: rotary positions and gated feed-forward layers, as gte-multilingual and Snowflake's Arctic Embed 2 have them."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, names_below, no_pooler, rotary_fields

_HARMLESS: Final = HARMLESS | {"auto_map", "unpad_inputs", "use_memory_efficient_attention", "layer_norm_type"}


def _parse(fields: Fields) -> TextEncoderConfig:
    fields.only("pack_qkv", True)
    fields.only("logn_attention_scale", False)
    fields.only("position_embedding_type", "rope")
    fields.only("layer_norm_type", "layer_norm")
    own = fields.dropped("position_embedding_type", "logn_attention_clip1")
    return TextEncoderConfig(**rotary_fields(own, positions=8192, types=1, theta=160_000.0))


FAMILY: Final = Family(parse=_parse, harmless=_HARMLESS, names=names_below("(new|gte)", "lm_head."), unused=no_pooler)
