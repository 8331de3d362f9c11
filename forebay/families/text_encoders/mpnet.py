"""MPNet: BERT whose scores depend on how far apart two tokens are."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below

_OFFSET: Final = 2  # positions begin behind that of the padding token, which is 1 whatever the file says


def _parse(fields: Fields) -> TextEncoderConfig:
    fields.only("relative_attention_num_buckets", 32)
    return TextEncoderConfig(**encoder_fields(fields, positions=512, offset=_OFFSET))


FAMILY: Final = Family(parse=_parse, harmless=HARMLESS, names=names_below("mpnet", "lm_head.", "pooler."))
