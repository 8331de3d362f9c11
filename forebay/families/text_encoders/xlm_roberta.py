"""XLM-RoBERTa: RoBERTa of many languages, such as multilingual E5 and BGE-M3."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below


def _parse(fields: Fields) -> TextEncoderConfig:
    offset = fields.size("pad_token_id", default=1, least=0) + 1
    return TextEncoderConfig(**encoder_fields(fields, positions=512, offset=offset, types=2))


FAMILY: Final = Family(parse=_parse, harmless=HARMLESS, names=names_below("roberta", "lm_head.", "pooler."))
