"""BERT: learned positions and kinds of tokens, a norm behind each part."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below, no_pooler


def _parse(fields: Fields) -> TextEncoderConfig:
    return TextEncoderConfig(**encoder_fields(fields, positions=512, types=2))


FAMILY: Final = Family(parse=_parse, harmless=HARMLESS, names=names_below("bert", "cls."), unused=no_pooler)
